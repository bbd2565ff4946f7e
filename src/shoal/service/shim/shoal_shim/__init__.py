"""All that travels as code: the names of what is installed on either side."""

from shoal.service.flower_app import client, server

__all__ = ["client", "server"]
