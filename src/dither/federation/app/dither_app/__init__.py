"""The Flower app of a Dither federation; all of it is in the package `dither`. The ServerApp runs the coordinator.
The ClientApp, behind a SuperNode, hands each message to the `dither join` that runs beside it."""

from dither.federation.flower.apps import client_app, server_app

server = server_app()
client = client_app()
