"""Requests that a program makes up from the API's own description: ``make fuzz``."""
