"""The HTTP interface: ``/api/v1``, problem+json, bearer tokens, deny by default."""
