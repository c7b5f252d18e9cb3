"""Fixtures of a scripted server."""

from tests.server.fixtures import client, scripted, server, server_settings, shared_backend, works_afterwards

__all__ = ["client", "scripted", "server", "server_settings", "shared_backend", "works_afterwards"]
