"""buildah as the tests run it: root in a container, no daemon, a store that goes with the test."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.small_target import NAME

TAG = "base"


class Buildah:
    """buildah with a store of its own, without privileges beyond root's."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        policy = scratch / "policy.json"
        policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
        self._policy = f"--signature-policy={policy}"
        self._front = ["buildah", f"--root={scratch}/root", f"--runroot={scratch}/run",
                       "--storage-driver=vfs"]  # fmt: skip

    def __call__(
        self, command: str, *options: str, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        policy = [self._policy] if command in ("build", "commit", "from", "push") else []
        return subprocess.run(
            [*self._front, command, *policy, *options],
            cwd=cwd,
            env=os.environ | {"BUILDAH_ISOLATION": "chroot", "TMPDIR": str(self.scratch)},
            capture_output=True,
            text=True,
            check=False,
        )

    def build(
        self, product: Path, base: Path | str, recipe: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Build the Containerfile of ``product`` on ``base``, a layout or an image of the store."""
        name = f"oci:{base}:{TAG}" if isinstance(base, Path) else base
        return self(
            "build", f"--build-arg=BASE={name}", f"--build-arg=LAYER=oci:image:{NAME}",
            f"--file={recipe or product / 'Containerfile'}", "--tag=gated", ".", cwd=product,
        )  # fmt: skip
