"""A party's side, behind a SuperNode: hands each message to the `dither join` that runs beside it."""

from dither.federation.flower.apps import client_app

app = client_app()
