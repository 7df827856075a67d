"""The papers' comparison on running engines: `pdrelay bench compare`."""
