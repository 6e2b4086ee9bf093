"""`tierd serve` with the fake engine: `run_front.py DIRECTORY JSON`.

The JSON: changes of settings; in `times` constants; in `log` the level, for tests that make more than a pipe holds; in
`card` the file that says how a made-up card is.
"""

import json
import logging
import sys
from pathlib import Path

import msgspec
from made_up_card import FileCard

from tierd.daemon import lifecycle, service
from tierd.daemon.card import Nvml
from tierd.daemon.config import Settings
from tierd.daemon.errors import TierdError

if __name__ == "__main__":
    root = Path(sys.argv[1])
    changes = json.loads(sys.argv[2])
    logging.basicConfig(level=changes.pop("log", "INFO"), format="%(name)s %(levelname)s %(message)s")
    for name, value in changes.pop("times", {}).items():
        setattr(service if hasattr(service, name) else lifecycle, name, value)
    card = changes.pop("card", None)
    given = {
        "models_dir": root / "models", "cache_dir": root / "cache", "socket": root / "run" / "t.sock",
        "listen": "127.0.0.1:0", "nvme_mem": 1 << 30, "default_model": "alpha",
        "keys_file": root / "keys.json", "batches_dir": root / "batches",
    }  # fmt: skip
    if "socket" in changes:
        changes["socket"] = Path(changes["socket"])
    fake = (sys.executable, "-S", str(Path(__file__).resolve().parent / "fake_engine.py"))
    packages = str(Path(msgspec.__file__).parents[1])
    try:
        open_card = Nvml if card is None else lambda: FileCard(Path(card))
        code = lifecycle.serve(Settings(**(given | changes)), command=(*fake, packages), open_card=open_card)
    except TierdError as exc:
        print(f"error: {exc}", file=sys.stderr)
        code = exc.exit_code
    sys.exit(code)
