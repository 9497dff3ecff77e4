"""What `lockstep debug` collects of a system that hangs or crawls, and what it reads in it."""
