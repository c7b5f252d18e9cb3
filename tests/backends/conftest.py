"""The fixture of a scripted server."""

from tests.server.fixtures import scripted, server, server_settings, shared_backend

__all__ = ["scripted", "server", "server_settings", "shared_backend"]
