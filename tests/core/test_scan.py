"""Extension packages are found by looking."""

from __future__ import annotations

from distribai.core.scan import modules


def test_a_scan_imports_every_module_of_a_package_in_the_order_of_names() -> None:
    found = [module.__name__ for module in modules("distribai.core.architectures")]
    assert found == ["distribai.core.architectures.decoder_transformer"]
