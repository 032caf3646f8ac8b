"""Looking at a run: while it goes on, afterwards, and for other systems."""
