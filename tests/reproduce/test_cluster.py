from mlm.reproduce.cluster import with_places


def test_runs_of_one_model_have_folders_of_their_own() -> None:
    lines = ["mlm pretrain model=a dp=1", "mlm pretrain model=a dp=64", "mlm pretrain model=b"]
    found = [line for _, line in with_places("v1", [("Train", line) for line in lines])]
    assert found == [f"{lines[0]} out=runs/v1-1", f"{lines[1]} out=runs/v1-2", lines[2]]


def test_a_folder_that_a_command_names_stays() -> None:
    lines = ["mlm pretrain model=a out=x", "mlm pretrain model=a out=y", "mlm eval piqa ckpt=x"]
    assert [line for _, line in with_places("v1", [("Do", line) for line in lines])] == lines


def test_a_corpus_is_explained_where_it_is_read() -> None:
    lines = ["mlm pretrain model=a data.path=web", "mlm pretrain model=b data.path=web-bert"]
    gpt2, bert = [what for what, _ in with_places("v1", [("Train", line) for line in lines])]
    assert gpt2 == "Train; data.path is a corpus by `mlm data build`"
    assert bert == "Train; data.path is a corpus by `mlm data build sentences=true append_eod=false`"
    said = "Train; data.path is a corpus by `mlm data build`"
    assert with_places("v1", [(said, lines[0])]) == [(said, lines[0])]
