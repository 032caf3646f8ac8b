"""Rewards behind HTTP: the embedded function host, how it is started, and the client. Import the submodules."""
