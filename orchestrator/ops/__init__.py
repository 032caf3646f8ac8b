"""What an operator runs beside a run: checks of the environment, costs, NVIDIA's MPS."""
