"""What may be set in more than one place, each key written once: a closed pydantic model is the table of a config, what a
plugin's process validates, and what command-line flags are made from. Needs pydantic, imports no engine."""
