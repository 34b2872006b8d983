"""The server's side."""

from dither.federation.flower.apps import server_app
from dither.federation.serving import coordinate

app = server_app(coordinate)
