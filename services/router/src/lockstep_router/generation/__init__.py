"""Turns a request from any face into text.

It owns prompts, sampling, and the choices of an answer. It knows no HTTP and no other transport.
"""
