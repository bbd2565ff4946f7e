"""All that travels as code: the names of what is installed on either side."""

from shoal.devices.flower import client, server

__all__ = ["client", "server"]
