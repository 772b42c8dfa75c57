"""Writes wordpiece.json: texts cut by BERT's own tokenizer in pure Python, with a small vocabulary.

    python make_wordpiece.py    (needs: pip install transformers)

Rust's `tokenizers`, which our tokenizer is made of, has no part in it.
"""

import json
import pathlib
import tempfile

from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

TEXTS = [
    "Hello, World!",
    "walking walked walker unwalkable",
    "naïve café Ångström ÉCOLE e\u0301cole Ü\u0308",
    "ИНТЕРНЕТ Привет, мир",
    # No capital sigma at the end of a word: Python makes it ς, Rust's tokenizers, which models are used with, σ.
    "İstanbul ıŞığı ΑΣΑ ς ß ẞ",
    "東京タワー 漢字and kana ひらがな 한국어",
    "नमस्ते दुनिया العَرَبِيَّة שָׁלוֹם ไทย",
    "tabs\tand\nlines\r\nand\u00a0spaces\u2003\u3000\u2028here",
    "control\u0000\u0001\u0007\u007f\u0085chars\u200b\u200d\ufeff\u00ad.",
    "a\ufffdb",
    "don't stop-it (now) [ok] {a} <b> $5.00 50% a_b @c #d ~e `f` ^g |h \\i / j=k+l",
    "¿Qué? «oui» — “quotes” … ‽ ₿ € ± × ÷",
    "emoji 🙂 👩‍👩‍👧 🇩🇪 text",
    "ＦＵＬＬ ｗｉｄｔｈ ① ½ ﬁ",
    "1234567890 3.14 1,000",
    "x" * 100 + " " + "x" * 101 + " after",
    "",
    "   ",
    # No compatibility ideographs: Python composes cased text first, which Rust's tokenizers do not.
    "㐀 \U00020000 豈",
]

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["hello", "world", "Hello", "World", "walk", "un", "naive", "cafe", "ecole", "東", "京", "text", "after", "and"]
PIECES = ["##ing", "##ed", "##er", "##able", "##walk", "##o", "##l", "##x", "##ло"]


def main():
    letters = set("".join(TEXTS) + "".join(TEXTS).lower() + "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    # Some letters only begin words, some only go on with them, some are unknown.
    plain = sorted(c for c in letters if c.isprintable() and not c.isspace() and ord(c) % 11 != 0)
    vocabulary = list(dict.fromkeys(SPECIAL + WORDS + PIECES + plain + ["##" + c for c in plain if ord(c) % 7 != 0]))
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "vocab.txt"
        path.write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
        for lowercase in [True, False]:
            tokenizer = BertTokenizerLegacy(str(path), do_lower_case=lowercase)
            for text in TEXTS:
                ids = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text))
                cases.append({"lowercase": lowercase, "text": text, "ids": ids})
    made = {"vocabulary": vocabulary, "cases": cases}
    path = pathlib.Path(__file__).with_name("wordpiece.json")
    path.write_text(json.dumps(made, ensure_ascii=True, indent=0) + "\n", encoding="utf-8")


main()
