"""What every lane did when, and traces of it."""
