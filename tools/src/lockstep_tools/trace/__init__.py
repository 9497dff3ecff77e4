"""What `lockstep trace` reads of a request's spans, and how it draws them."""
