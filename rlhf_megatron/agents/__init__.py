"""Episodes of several turns; the controller and the agents' workers load this wing."""
