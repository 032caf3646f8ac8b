"""Weight versions in a running engine: fetched, staged, put in place, verified."""
