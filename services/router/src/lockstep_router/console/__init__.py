"""The web console: its files, and the state that its page shows. It changes nothing in the router."""
