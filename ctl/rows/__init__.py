"""The rows of one replica, and what it exchanges with the other replicas."""
