"""`lockstep bench state`: what the prefix cache's third tier gives, and from which length of a prefix on it pays."""
