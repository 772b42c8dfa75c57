"""Writes the tokenizers that the tiny checkpoints were converted with, so that `fornax convert` can be compared byte by byte.

    python crates/fornax/tests/convert/make.py
It takes them from `crates/model/tests/fixtures/make.py`, without what no converter reads: the map of characters of
`tokenizer.model`. The other one puts no space before a text, since GGUF files cannot say that of such tokenizers.
"""

import json
import tempfile
import types
from pathlib import Path

from sentencepiece import sentencepiece_model_pb2

HERE = Path(__file__).parent
FIXTURES = HERE / "../../../model/tests/fixtures/make.py"


def main():
    fixtures = types.ModuleType("make")
    fixtures.__file__ = str(FIXTURES)
    # All but its last line, which makes the checkpoints.
    exec(compile(FIXTURES.read_text().rsplit("main()", 1)[0], FIXTURES, "exec"), fixtures.__dict__)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        proto = sentencepiece_model_pb2.ModelProto()
        proto.ParseFromString(fixtures.tokenizer(folder).read_bytes())
        proto.normalizer_spec.precompiled_charsmap = b""
        proto.trainer_spec.ClearField("input")
        proto.trainer_spec.ClearField("model_prefix")
        (HERE / "tokenizer.model").write_bytes(proto.SerializeToString())
        fixtures.byte_tokenizer(folder, [])
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["pre_tokenizer"]["add_prefix_space"] = False
        (HERE / "tokenizer.json").write_text(json.dumps(tokenizer) + "\n")
        (HERE / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())


if __name__ == "__main__":
    main()
