"""What runs inside a Megatron training process: the model, the objective, the trainer behind the ``Trainer`` port.

Importing this package imports neither torch nor Megatron; its modules do. It never imports the vLLM plugin.
"""
