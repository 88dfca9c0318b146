from __future__ import annotations

import json

from builder.bundle import Artifact
from builder.receipt import ConnectorFacts, Input, receipt

PINS = {
    "schema": "sparkcache.pins/v1",
    "target": "v0.28.0",
    "version": "0.28.0",
    "local_version": "0.28.0+spark.1",
    "commit": {"id": "2c" * 20, "status": "unproven"},
    "source": {"tree": "aa" * 20},
    "bases": {
        "cpu-x86_64": {"filename": "w.whl", "native": {"sha256": "11" * 32, "count": 3}},
        "cuda-x86_64": {"filename": "v.whl", "native": {"sha256": "22" * 32, "count": 17}},
    },
    "patches": [{"name": "0002-b.patch", "sha256": "b" * 64}, {"name": "0001", "sha256": "a"}],
    "modules": [{"path": "vllm/x.py", "mode": "100644", "sha256": "c" * 64, "git": "d" * 40}],
    "composed": {"vllm_tree": "ee" * 20, "manifest_sha256": "f" * 64},
    "contract": {"sha256": "9" * 64},
}
CONNECTOR = ConnectorFacts("0.1.0", "c.whl", "a" * 40, "b" * 64, {"p/c.json": "9" * 64}, "9" * 64)
INPUTS = [Input("vllm.tar.gz", "2" * 64, 2), Input("w.whl", "1" * 64, 1)]
ARTIFACTS = {"w+spark.1.whl": Artifact("3" * 64, 3), "NOTICE": Artifact("4" * 64, 4)}


def test_receipt_repeats_the_pins_of_its_base_and_adds_what_was_read_and_made() -> None:
    data = receipt(PINS, "8" * 64, "cpu-x86_64", INPUTS, CONNECTOR, ARTIFACTS)
    found = json.loads(data)
    assert found["schema"] == "sparkcache.receipt/v1"
    for key in ("target", "local_version", "commit", "contract", "patches", "modules"):
        assert found[key] == PINS[key]
    assert found["composition"] == PINS["composed"]
    assert found["native"] == {"sha256": "11" * 32, "count": 3}
    assert found["pins"] == {"sha256": "8" * 64}
    assert found["base"] == "cpu-x86_64"
    assert found["inputs"][1] == {"name": "w.whl", "sha256": "1" * 64, "size": 1}
    assert found["connector"]["generated"] == {"p/c.json": "9" * 64}
    assert found["artifacts"]["NOTICE"] == {"sha256": "4" * 64, "size": 4}
    assert data == (json.dumps(found, sort_keys=True, separators=(",", ":")) + "\n").encode()


def test_receipt_does_not_depend_on_the_order_in_which_things_were_read_or_made() -> None:
    first = receipt(PINS, "8" * 64, "cpu-x86_64", INPUTS, CONNECTOR, ARTIFACTS)
    again = receipt(
        PINS,
        "8" * 64,
        "cpu-x86_64",
        INPUTS[::-1],
        CONNECTOR,
        dict(reversed(ARTIFACTS.items())),
    )
    assert first == again
