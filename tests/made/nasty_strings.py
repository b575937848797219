"""A thousand strings that tokenizers stumble over, the same on every machine."""

import hashlib
import zlib
from collections.abc import Sequence

_PIECES = (
    "the quick brown fox", "Hello", "HELLO", "iPhone", "snake_case_name", "CamelCaseName", "don't", "DON'T", "I'Ll",
    "it's", "we'RE", "'tis", "'", "''", "\"quoted\"", "…", "—", "––", "!!!", "?!?", "...", "(((", "}])", "$$", "£5", "€",
    "1", "12", "123", "1234", "3.14159", "1,000,000", "0x1F", "٣٤٥", "½", "²", "Ⅷ", "①", "१२३",
    " ", "  ", "   ", "       ", "\t", "\t\t", "\n", "\n\n", "\r\n", " \n ", "\n \n", "\xa0", "\u3000", "\u2003", "\u200b",
    "\ufeff", "é", "e\u0301", "ñ", "Å", "A\u030a", "ﬁ", "ß", "İ", "ǅ", "Straße", "naïve", "Ελληνικά", "русский", "Україна",
    "中文字符", "漢字かな", "カタカナ", "한국어", "ᄒ\u1161\u11ab", "العربية", "עברית", "हिन्दी", "ไทย", "தமிழ்", "🙂",
    "👩\u200d👩\u200d👧", "🇩🇪🇫🇷", "👍🏽", "𝔘𝔫𝔦", "𐍈", "x\u0300\u0301\u0302", "∑∫√", "→⇒", "a\u00adb", "\u202eabc\u202c",
    "def f(x):\n    return x+1\n", "<div class=\"a\">", "</s>x", "https://example.org/a?b=c&d=%20", "user@example.com",
    "C:\\Users\\x", "#include <stdio.h>", "/* c */", "x = {'a': [1, 2]}", "\\n", "%d%%", "~`^|", "__init__", "--flag",
    "aaaaaaaaaaaaaaaaaaaa", "abcabcabcabc", "\x01\x02", "\x7f", "\u0085", "\u2028", "Ωmega", "μm", "ſ", "K", "Ⅷ.", "a\u0308\u0323",
)  # fmt: skip


def nasty_strings(count: int = 1000) -> list[str]:
    """Return strings of one to seven pieces, some joined by spaces."""
    strings = []
    for number in range(count):
        raw = hashlib.shake_128(f"nasty {number}".encode()).digest(16)
        pieces = [_PIECES[byte % len(_PIECES)] for byte in raw[1 : 2 + raw[0] % 7]]
        strings.append((" " if raw[15] % 2 else "").join(pieces))
    return strings


def digest(ids: Sequence[int]) -> int:
    """Return a digest of token ids, 16 bits."""
    return zlib.crc32(b" ".join(str(int(token_id)).encode() for token_id in ids)) & 0xFFFF
