"""How a gateway relays token streams: load, engines and peers of `pdrelay bench gateway`."""
