"""Code that is sent to hosts has no secrets, whether Git has them or not, and nothing from
elsewhere.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from aiorl.errors import ConfigError
from aiorl.launch.shipment import code_archive, look_through

KEY = b"-----BEGIN OPENSSH PRIVATE KEY-----\n"
SECRETS = [
    ".env",
    ".env.local",
    ".envrc",
    "prod.env",
    "pack/.env",
    ".aws/credentials",
    ".aws/config",
    "sub/.ssh/config",
    ".ssh/known_hosts",
    "id_rsa",
    "id_ed25519",
    "id_ed25519.pub",
    "id_github",
    "id_rsa.old",
    "server.pem",
    "tls/x.KEY",
    ".netrc",
    "_netrc",
    ".git-credentials",
    ".npmrc",
    ".pypirc",
    ".pgpass",
    ".kube/config",
    ".docker/config.json",
    ".config/gcloud/application_default_credentials.json",
    "gcloud/x",
    "credentials.json",
    "my-credentials.json",
    "client_secret_1.json",
    "service-account.json",
    "kubeconfig",
    "secrets.yaml",
    "a.p12",
    "a.pfx",
    "worker.key_secret",
    ".gnupg/a",
    "terraform.tfstate",
    ".huggingface/token",
    "token",
    "web.token",
    "client.token",
    "hf_token",
    "wandb.token",
    "HF-Token.txt",
    "token.json",
    ".cache/huggingface/token",
    "stored_tokens",
    "kaggle.json",
    "rclone.conf",
    ".databrickscfg",
    "gcloud/x.json",
    "pack/token",
]
CODE = [
    "env.py",
    "id_mapping.py",
    "secrets.py",
    "keys.py",
    "pack/__init__.py",
    "environment.yml",
    ".env.example",
    "credentials.py",
    "kubeconfig.py",
    "id_rsa_env.py",
    "prod.env.py",
    "token.py",
    "tokens.txt",
    "tokenizer.json",
    "pack/gcloud/__init__.py",
    "pack/gcloud/play.py",
    "pack/gcloud/map.json",
]


def tree(place: Path, *names: str, content: bytes = b"x = 1\n") -> Path:
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return place


@pytest.fixture(params=["plain", "untracked", "tracked"])
def code(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a directory with code and secrets: without Git, unknown to Git, or committed."""
    place = tree(tmp_path / "code", *SECRETS, *CODE)
    tree(place, "renamed", "key.py", content=KEY)
    tree(tmp_path, "outside.py", "elsewhere/a.py")
    (place / "link.py").symlink_to(tmp_path / "outside.py")
    (place / "linked").symlink_to(tmp_path / "elsewhere")
    (place / "alias").symlink_to(".env")
    (place / "alias.py").symlink_to(".env")
    (place / "again.py").symlink_to("env.py")
    (place / "dangling").symlink_to("missing")
    (place / "circle").symlink_to("circle")
    if request.param != "plain":
        subprocess.run(["git", "init", "-q", place], check=True, timeout=20)
    if request.param == "tracked":
        subprocess.run(["git", "-C", place, "add", "--force", "."], check=True, timeout=20)
    return place


def names_in(packed: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        return {name.removeprefix("code/") for name in tar.getnames()}


def test_neither_secrets_nor_files_from_elsewhere_are_sent_but_named(code: Path) -> None:
    shipment = look_through(code)
    assert shipment.files == sorted(map(Path, [*CODE, "again.py"]))
    assert {*SECRETS, "renamed", "key.py", "alias", "alias.py", "link.py"} <= {
        str(path) for path in shipment.left_out
    }
    assert names_in(code_archive(code)) == {*CODE, "again.py"}
    about = shipment.about_left_out()
    assert str(len(shipment.left_out)) in about
    assert str(shipment.left_out[0]) in about
    assert "--include" in about
    assert len(about) < 2000


def test_what_the_user_includes_is_sent(code: Path) -> None:
    files = {str(path) for path in look_through(code, [".env", "tls/*.KEY", "link.py"]).files}
    assert files == {*CODE, "again.py", ".env", "tls/x.KEY", "link.py"}
    assert ".env" in names_in(code_archive(code, include=[".env"]))
    assert Path(".env") not in look_through(code, [".env"]).left_out


@pytest.mark.parametrize("word", ["missing", "../outside.py", "/etc/hostname", "*.none"])
def test_a_file_to_include_must_exist_in_the_directory(tmp_path: Path, word: str) -> None:
    tree(tmp_path, "outside.py", "code/env.py")
    with pytest.raises(ConfigError) as error:
        look_through(tmp_path / "code", [word])
    assert (error.value.key, error.value.value) == ("include", word)


def test_a_directory_without_secrets_says_nothing(tmp_path: Path) -> None:
    assert look_through(tree(tmp_path, *CODE)).about_left_out() == ""


def test_a_wheel_is_sent_whole_because_its_files_have_been_chosen(tmp_path: Path) -> None:
    names = {"mine.py", "gcloud/data.json", "mine/credentials.json"}
    with zipfile.ZipFile(tmp_path / "mine.whl", "w") as wheel:
        for name in names:
            wheel.writestr(name, "x = 1")
    assert names_in(code_archive(tmp_path / "mine.whl")) == names
