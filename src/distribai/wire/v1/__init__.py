"""Generated from distribai.proto by `make proto`; not edited by hand."""
