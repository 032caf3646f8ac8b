"""Finished trajectories as immutable columnar files, and the references by which others read them."""
