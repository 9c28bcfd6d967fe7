"""Files -> rows: what is read, in which order, and what a wrong file says."""

import json
import re
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datum.errors import DataError
from datum.rows import Row, read_hub, read_rows, row_form

TEXT = st.text(max_size=20)
ROWS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"text": TEXT}),
        st.fixed_dictionaries({"prompt": TEXT, "completion": TEXT}, optional={"answer": TEXT}),
        st.fixed_dictionaries({"tokens": st.lists(st.integers(0, 9), max_size=4)}),
        st.fixed_dictionaries(
            {"messages": st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), max_size=3)}
        ),
    ),
    min_size=1,
    max_size=6,
)


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def texts(path, **options):
    return [row.data["text"] for row in read_rows(path, **options)]


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, columns=st.booleans())
def test_rows_come_back_as_written_and_in_order(rows, columns, tmp_path_factory):
    """JSONL and Parquet alike, forms mixed in one file: a column that a row does not have is null there, and absent."""
    folder = tmp_path_factory.mktemp("rows")
    if columns:
        path = folder / "rows.parquet"
        keys = sorted({key for row in rows for key in row})
        pq.write_table(pa.Table.from_pylist([{key: row.get(key) for key in keys} for row in rows]), path)
        places = [f"{path} row {i}" for i in range(len(rows))]
    else:
        path = write(folder / "rows.jsonl", *rows)
        places = [f"{path}:{i}" for i in range(1, len(rows) + 1)]
    assert list(read_rows(path)) == [Row(row, place) for row, place in zip(rows, places)]


def test_a_row_of_nulls_and_unset_struct_fields_keeps_what_is_there(tmp_path):
    path = tmp_path / "a.parquet"
    calls = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "name": "b"}]
    pq.write_table(pa.Table.from_pylist([{"messages": calls}]), path)
    (row,) = read_rows(path)
    assert row.data == {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "name": "b"}]}
    write(tmp_path / "b.jsonl", {"text": "a", "messages": None})
    assert [row.data for row in read_rows(tmp_path / "b.jsonl")] == [{"text": "a"}]


def test_folders_and_globs_are_read_by_name_whatever_the_order_on_disk(tmp_path):
    for name in ["b/2.jsonl", "a.jsonl", "b/1.jsonl", "c.txt"]:
        write(tmp_path / name, {"text": name})
    pq.write_table(pa.table({"text": ["p"]}), tmp_path / "aa.parquet")
    assert texts(tmp_path) == ["a.jsonl", "p", "b/1.jsonl", "b/2.jsonl"]
    assert texts(f"{tmp_path}/**/*.jsonl") == ["a.jsonl", "b/1.jsonl", "b/2.jsonl"]
    assert texts(f"{tmp_path}/b/[2-9].jsonl") == ["b/2.jsonl"]
    names = [f"{i * 7 % 30:02}" for i in range(30)]
    for name in names:
        write(tmp_path / "many" / f"{name}.jsonl", {"text": name})
    assert texts(tmp_path / "many") == texts(f"{tmp_path}/many/*") == sorted(names)
    write(tmp_path / "d[1].jsonl", {"text": "d"})
    assert texts(tmp_path / "d[1].jsonl") == ["d"]  # an existing file is no glob


def test_a_list_numbers_its_entries_and_carries_their_weights(tmp_path):
    a, b = write(tmp_path / "a.jsonl", {"text": "a"}, {"text": "b"}), write(tmp_path / "b.jsonl", {"text": "c"})
    rows = list(read_rows([str(a), {"path": str(b), "weight": 2.5}]))
    assert [(row.data["text"], row.source, row.weight) for row in rows] == [("a", 0, 1), ("b", 0, 1), ("c", 1, 2.5)]


def test_pkg_paths_lead_into_installed_packages(tmp_path, monkeypatch):
    write(tmp_path / "some_package" / "data" / "a.jsonl", {"text": "inside"})
    (tmp_path / "some_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert texts("pkg://some_package/data/a.jsonl") == ["inside"]
    with pytest.raises(DataError, match=re.escape("pkg://no_such_package/a.jsonl: there is no installed package")):
        texts("pkg://no_such_package/a.jsonl")


def test_max_rows_counts_over_all_entries(tmp_path):
    a, b = write(tmp_path / "a.jsonl", {"text": "a"}, {"text": "b"}), write(tmp_path / "b.jsonl", {"text": "c"})
    assert texts([a, b], max_rows=1) == ["a"]
    assert texts([a, b], max_rows=3) == ["a", "b", "c"]
    assert texts([a, b], max_rows=9) == ["a", "b", "c"]
    with pytest.raises(DataError, match="max_rows=2 is used up by the entries before it, so this part of the mixture"):
        texts([a, {"path": b, "weight": 0.5}], max_rows=2)


def test_reading_is_lazy(tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "a"})
    path.write_text(path.read_text() + "broken")
    assert len(list(islice(read_rows(path), 1))) == 1


def test_blank_lines_and_a_byte_order_mark_hold_no_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n{"text": "b"}')
    assert [(row.data["text"], row.where) for row in read_rows(path)] == [("a", f"{path}:1"), ("b", f"{path}:3")]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"text": "a"', ":2: malformed JSON (Expecting ',' delimiter at column 13); a JSONL file has one complete"),
        (
            "[1, 2]",
            ":2: a row must be a JSON object, got list; accepted are messages | prompt and completion | text | tokens",
        ),
        ('"text"', ":2: a row must be a JSON object, got str"),
        ("[" * 100_000, ":2: malformed JSON (nested too deeply)"),
        ('{"words": "a", "n": 3}', ":2: no known row form, its keys are n, words; accepted are messages | prompt and"),
        ('{"prompt": "a"}', ":2: no known row form, its keys are prompt; accepted are"),
        (
            '{"text": "a", "tokens": [1]}',
            ":2: the row has the keys of several forms (text, tokens); say which is meant: data.format=text",
        ),
        ('{"text": "\udcff"}', ":2: the line is not UTF-8 (invalid start byte at byte 10)"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, text):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(DataError, match=re.escape(f"{path}{text}")):
        list(read_rows(path))


def test_the_format_asked_for_is_checked_on_every_row(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": []}, {"text": "a"})
    assert len(list(read_rows(path))) == 2
    text = f"{path}:2: format=messages needs the keys messages, this row has text; it looks like format=text"
    with pytest.raises(DataError, match=re.escape(text)):
        list(read_rows(path, format="messages"))
    assert row_form(Row({"text": "a", "tokens": [1]}, "x"), "tokens") == "tokens"
    with pytest.raises(DataError, match="format=tokens needs the keys tokens or input_ids, this row has none"):
        row_form(Row({}, "x:1"), "tokens")
    with pytest.raises(ValueError, match="format='chat': accepted are auto, messages, prompt_completion, text, tokens"):
        list(read_rows(path, format="chat"))


def test_paths_that_lead_nowhere_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "a.csv").touch()
    (tmp_path / "broken.parquet").write_text("PAR")
    cases = [
        ("missing.jsonl", f"missing.jsonl: no such file or folder (working folder {tmp_path})"),
        ("no*.jsonl", f"no*.jsonl: no file matches the glob (working folder {tmp_path})"),
        ("empty", "empty: the folder has no *.jsonl or *.parquet file in it or below it"),
        ("empty.jsonl", "empty.jsonl: no rows; a data set needs at least one"),
        ("a.csv", "a.csv: unknown kind of file '.csv'; accepted are .jsonl and .parquet"),
        ("broken.parquet", "broken.parquet: not a readable Parquet file, at row 0:"),
        ([], "the list of paths is empty; name at least one file, folder or glob"),
        ([3], "a path must be a string or {path: …, weight: …}, got 3"),
        ([{"path": "a", "wieght": 1}], "a path entry has the keys path and weight, got 'wieght'"),
        ([{"path": "a", "weight": 0}], "a: weight must be a finite number above 0, got 0"),
        ([{"path": "a", "weight": float("inf")}], "a: weight must be a finite number above 0, got inf"),
    ]
    for path, text in cases:
        with pytest.raises(DataError, match=re.escape(text)):
            list(read_rows(path))


def test_hub_reads_a_local_folder_in_the_library_s_form(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "set" / "train.jsonl", {"text": "a"}, {"text": "b"}, {"text": None})
    write(tmp_path / "set" / "test.jsonl", {"text": "c"})
    name = str(tmp_path / "set")
    assert [row.data["text"] for row in read_hub(name, max_rows=2)] == ["a", "b"]
    assert list(read_hub(name, split="test")) == [Row({"text": "c"}, f"{name}[test] row 0")]
    with pytest.raises(DataError, match=re.escape(f"{name}[train] row 2: no known row form, its keys are none")):
        list(read_hub(name))
    with pytest.raises(DataError, match=r"dataset \S+ \(subset None, split dev\) cannot be loaded: Unknown split"):
        list(read_hub(name, split="dev"))
    with pytest.raises(DataError, match=r"dataset \S+nowhere \(subset None, split train\) cannot be loaded: "):
        list(read_hub(str(tmp_path / "nowhere")))
