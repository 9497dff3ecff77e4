"""A router and workers as child processes of this machine, and what the router reports of them."""
