"""The same task, model and cores with other trainers: what their users write, and what measures both."""
