"""From a trainer's ranks to published versions."""
