"""Where trajectories run, by forecasts of their lengths (Heddle 4 and 5): who asks the policies, and acts."""
