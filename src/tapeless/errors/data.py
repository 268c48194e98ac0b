"""Errors of text, token files, tokenizers and files written by other software.

Tested by: tests/test_catalogue.py."""

from tapeless.errors.base import Known, TapelessError


class DataError(TapelessError, ValueError):
    """Text, token files or tokenizers that cannot be trained on."""

    code = "DATA"
    exit_status = 2
    fix = "fix the file at the place that the message names"


class UntrustedFileError(TapelessError, ValueError):
    """A file from another program that is damaged, points outside of its directory, or is not a model."""

    code = "UNTRUSTED_FILE"
    exit_status = 2
    fix = "download the directory again, or write it again with save_pretrained of transformers"


NO_SUCH_PATH = Known(
    DataError,
    "{path}: no such file or folder (looked in {folder})",
    "a `--dataset-path` that does not exist",
    "check the spelling, or give the full path",
)
NO_FILES = Known(
    DataError,
    "{path}: {what}",
    "a folder or pattern that matches no text file",
    "{fix}",
)
UNREADABLE = Known(
    DataError,
    "{path}: cannot be read: {reason}",
    "a file without read permission, or a disk error",
    "check its owner and permissions",
)
EMPTY_DATA = Known(
    DataError,
    "{path} is empty: there is nothing to train on",
    "a file of 0 bytes, or only such files",
    "give a file with text",
)
ONLY_WHITESPACE = Known(
    DataError,
    "{path} holds only whitespace: there is nothing to train on",
    "only spaces and line breaks",
    "give a file with text",
)
TOO_FEW_TOKENS = Known(
    DataError,
    "the {part} part has {count} tokens, but one window of seq_len {seq_len} needs {needed}",
    "less text than one window, in the training or in the validation part",
    "give more text or set --seq-len to {most} or less",
)
NOT_UTF8 = Known(
    DataError,
    "{path}: byte 0x{byte:02x} at offset {offset} is not UTF-8 ({reason})",
    "text in another encoding, or a damaged file; guessing would train a model on mojibake",
    "convert it, for example: iconv -f LATIN1 -t UTF-8",
)
OTHER_ENCODING = Known(
    DataError,
    "{path}: is {encoding}, expected UTF-8",
    "a byte order mark of UTF-16 or UTF-32, which some editors write",
    "convert it: iconv -f {encoding} -t UTF-8",
)
BINARY_FILE = Known(
    DataError,
    "{path}: byte {offset} is NUL, so this is a binary file",
    "an image, an archive, a program or weights instead of text",
    "give UTF-8 text",
)
PICKLE = Known(
    DataError,
    "{path}: is a pickle, which can execute code when it is loaded",
    "a file of `torch.save` or `pickle.dump`; tapeless never unpickles",
    "give {expected}",
)
NOT_JSON = Known(
    DataError,
    "{path}:{line}: not JSON: {reason}",
    "a line of a `.jsonl` file that is not one JSON value, or a damaged list of records in a `.json`",
    "fix or remove the line",
)
LONG_LINE = Known(
    DataError,
    "{path}:{line}: a line of more than {most} MB",
    "a `.jsonl` file whose record is as large as a library, or a file of one line that is no JSONL",
    "give each document a line of its own, or name a text file .txt",
)
EXPANDS = Known(
    DataError,
    "{path}: unpacks to more than {size} MB, over {ratio} times its size",
    "a packed file of almost nothing but repetitions, which would fill the disk",
    "unpack it, look at what it holds, and give the unpacked file",
)
NO_TEXT_FIELD = Known(
    DataError,
    "{path}:{line}: no field `{field}`, got {got}",
    "a line of a `.jsonl` file whose text has another name, or none",
    "name the field with --text-field, or remove the line",
)
BAD_RECORD = Known(
    DataError,
    "{path}:{line}: expected an object with a string `{field}`, got {got}",
    "a line of a `.jsonl` file or a row of a table whose field `text`, or the one that `--text-field` names, is not text",
    "fix or remove it, or name another with --text-field",
)
NO_COLUMN = Known(
    DataError,
    "{path}: no column `{field}`, got {got}",
    "a Parquet file or a dataset whose text has another name, or none",
    "name the column with --text-field",
)
NOT_WHOLE = Known(
    DataError,
    "{path}: not a complete {form} file: {reason}",
    "a truncated table, `.gz` or `.zst` file, or another file with such a name",
    "get the file again",
)
BAD_TOKEN_FILE = Known(
    DataError,
    "{path}: {got}, expected {expected}",
    "a truncated token file, or one of an unsupported kind or version",
    "get the file again; supported are tapeless, llm.c (magic 20240520, version 1) and nanoGPT (plain uint16)",
)
NO_TOKENIZER = Known(
    DataError,
    "{path}: token files do not name their tokenizer{pickle}",
    "token files of nanoGPT or llm.c, and no `--tokenizer`; a guess could give wrong text and wrong bits per byte",
    "give --tokenizer FILE; `tapeless tokenizer train TEXT --kind char --out FILE` makes nanoGPT's character tokenizer",
)
ALTERED_DATA = Known(
    DataError,
    "{path}: written into while the run was training on it: sha256 {got}, expected {expected}; nothing was saved since",
    "a program wrote into a token file in place; a run shares its token files with the folder they came from, by hard links",
    "restore the file, then resume from the last checkpoint",
)
TRUNCATED_DATA = Known(
    DataError,
    "{path}: cut short while it was being read: {size} bytes, expected {expected}",
    "a program shortened a token file in place; a run shares its token files with the folder they came from, by hard links",
    "restore the file, then resume from the last checkpoint",
)
BEYOND_VOCABULARY = Known(
    DataError,
    "{path}: token {index} is {token}, outside of the vocabulary of {vocab_size}",
    "a damaged token file, or one of another tokenizer; ids are never clamped",
    "give the tokenizer that the file was made with",
)
