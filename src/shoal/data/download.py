"""Files of data sets: found in a folder, or downloaded from their official address and checked."""

import hashlib
import os
import urllib.request
import zipfile
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from shoal.core.errors import ShoalError, describe_error
from shoal.storage.files import damaged_file_error, explain_disk_errors

LIMIT = 2**31
"""The most bytes that a reader takes in from one file, packed or unpacked."""

TIMEOUT = 30
"""Seconds without a single byte after which a download is given up."""


@dataclass(frozen=True)
class SourceFile:
    """A file as its authors publish it: its name, its address and, where they state it, its checksum."""

    name: str
    url: str = ""
    md5: str = ""
    also: tuple[str, ...] = ()
    """Other names that serve as well: unpacked, or as other tools lay it out."""

    def find_in(self, folder: Path) -> Path | None:
        """The path of the file in a folder, or of one that can replace it; unpacked ones are preferred."""
        for path in (folder / name for name in (*self.also, self.name)):
            if path.is_file() or (path.is_dir() and any(path.iterdir())):
                return path
        return None


def find_data_file(folder: Path, names: Iterable[str]) -> Path:
    """The first of these files that is there."""
    names = list(names)
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ShoalError("no-data", f"There is no {' or '.join(names)} in {folder}.", "Put the official files there.")


def download_file(file: SourceFile, folder: Path) -> Path:
    """Fetch a file; it takes its place only when it is complete and its checksum is right."""
    place = folder / file.name
    temporary = place.with_name(f".{place.name}.{os.getpid()}.part")
    digest = hashlib.md5(usedforsecurity=False)
    size = 0
    try:
        if not file.url.startswith(("http://", "https://")):
            raise ValueError("it has no address to fetch it from")
        with closing(urllib.request.urlopen(file.url, timeout=TIMEOUT)) as answer:
            with explain_disk_errors(place):
                folder.mkdir(parents=True, exist_ok=True)
                target = open(temporary, "wb")
            with target:
                while block := answer.read(1 << 20):
                    digest.update(block)
                    size += len(block)
                    if size > LIMIT:
                        raise ValueError("it is far larger than it should be")
                    with explain_disk_errors(place):
                        target.write(block)
            expected = answer.headers.get("Content-Length", "")
        if expected.isdecimal() and int(expected) != size:
            raise ValueError(f"it ended after {size} of {expected} bytes")
        if file.md5 and digest.hexdigest() != file.md5:
            raise ValueError(f"its md5 is {digest.hexdigest()}, the official one {file.md5}")
        with explain_disk_errors(place):
            os.replace(temporary, place)
    except (OSError, HTTPException, ValueError) as error:
        raise make_missing_file_error(
            file, folder, str(error) if isinstance(error, ValueError) else describe_error(error)
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return place


def make_missing_file_error(file: SourceFile, folder: Path, why: str) -> ShoalError:
    """The error for a file that is neither there nor can be downloaded."""
    return ShoalError(
        "no-data",
        f"{file.name} is not in {folder} and could not be fetched from {file.url or 'anywhere'} ({why}).",
        f"Fetch it by hand, put it into {folder}, or name another folder with --data-dir or SHOAL_DATA.",
    )


def read_bytes(path: Path) -> bytes:
    """The content of a file, refused where it is too large."""
    with explain_disk_errors(path):
        if not path.is_file():
            raise ShoalError("no-data", f"{path} is missing or not a file.", "Put the official files there.")
        if path.stat().st_size > LIMIT:
            raise damaged_file_error(path, f"more than {LIMIT} bytes")
        return path.read_bytes()


class ZipReader:
    """Reads single files of a zip archive into memory. Nothing is unpacked, so names cannot lead anywhere."""

    def __init__(self, path: Path):
        self.path = path
        self.left = LIMIT
        try:
            with explain_disk_errors(path):
                self.archive = zipfile.ZipFile(path)
                self.names = [info.filename for info in self.archive.infolist() if not info.is_dir()]
        except ShoalError:
            raise
        except Exception as error:
            raise damaged_file_error(path, error) from error

    def read(self, name: str) -> bytes:
        try:
            with self.archive.open(name) as file:
                content = file.read(self.left + 1)
        except Exception as error:
            raise damaged_file_error(self.path, error) from error
        self.left -= len(content)
        if self.left < 0:
            raise damaged_file_error(self.path, f"it unpacks to more than {LIMIT} bytes")
        return content

    def close(self) -> None:
        self.archive.close()
