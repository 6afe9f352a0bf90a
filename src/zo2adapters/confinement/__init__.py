"""What comes from strangers is worked on by a child process, under limits of memory and time."""
