"""Tasks: rows of data, objectives, and evaluations. ``registry`` lists all tasks by name."""
