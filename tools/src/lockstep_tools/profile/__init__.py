"""What `lockstep profile` reads in the ranks' profiles: one file for Perfetto, and which rank the others wait for."""
