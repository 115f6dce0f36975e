# SPDX-License-Identifier: Apache-2.0
"""Every message of docs/protocol.md: its parameters and its result, typed. A test compares the page with this table.

Params are input from outside: strict types, nothing unknown, everything bounded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from rigfit.server.wire import NONCE_BYTES, hex_bytes

PROTOCOL = 1

# The codes of JSON-RPC 2.0, section 5.1, and the link's own.
BAD_JSON, BAD_REQUEST, UNKNOWN_METHOD, BAD_PARAMS, UNEXPECTED = -32700, -32600, -32601, -32602, -32603
USER_ERROR, CANCELLED, HELLO_FAILED = 1, 2, 3

MAX_PHOTOS = 32
MAX_OBJECTS = 1000
MAX_PARAMETERS = 20_000


class BadParamsError(Exception):
    """What is wrong with the parameters of a request, as a sentence."""


# --- types ------------------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    # pydantic's own str refuses lone surrogates: file names that are no UTF-8, and keys that Blender 4 cut in a character.
    if not isinstance(value, str):
        raise ValueError("it has to be a text")
    if len(value) > 100_000:
        raise ValueError("it is too long")
    return value


def _path(value: Any) -> str:
    path = _text(value)
    if not os.path.isabs(path) or "\0" in path:
        raise ValueError("it has to be an absolute path")
    return path


def _nonce(value: Any) -> bytes:
    return hex_bytes(_text(value), NONCE_BYTES)


def _number(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53:
        raise ValueError("it is too large")
    return value


Text = Annotated[str, PlainValidator(_text)]
AbsolutePath = Annotated[str, PlainValidator(_path)]
Nonce = Annotated[bytes, PlainValidator(_nonce)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
Index = Annotated[int, Field(ge=0, le=10_000)]
Id = Annotated[int, Field(ge=0, le=2**53)]
Values = Annotated[dict[Text, Number], Field(max_length=MAX_PARAMETERS)]
Objects = Annotated[list[Text], Field(min_length=1, max_length=MAX_OBJECTS)]


class Params(BaseModel):
    """Parameters of a request; optional ones have a default."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Result(BaseModel):
    """Result of a request."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Nothing(Params):
    pass


class Done(Result):
    pass


# --- hello ------------------------------------------------------------------------------------------------------------


class HelloParams(Params):
    protocol: Annotated[int, Field(ge=0, le=2**31)]
    client: Text
    nonce: Nonce


class HelloResult(Result):
    protocol: int
    server: str
    pid: int
    nonce: str
    proof: str


class AuthenticateParams(Params):
    proof: Text


# --- at once ----------------------------------------------------------------------------------------------------------


class PingResult(Result):
    busy: bool
    queued: int
    uptime_s: float


class CancelParams(Params):
    id: Id


class CancelResult(Result):
    found: bool


# --- jobs -------------------------------------------------------------------------------------------------------------


class DoctorParams(Params):
    blender: AbsolutePath | None = None


class CheckResult(Result):
    name: str
    status: Literal["ok", "warning", "failed"]
    found: str
    fix: str | None


class DoctorResult(Result):
    checks: list[CheckResult]
    version: str


class DefaultRigParams(Params):
    asymmetric: bool = False


class DefaultRigResult(Result):
    description: str


class RegisterParams(Params):
    spec: AbsolutePath
    blend: AbsolutePath | None = None
    objects: Objects | None = None
    metres_per_unit: Positive | None = None
    blender: AbsolutePath | None = None


class RegisterResult(Result):
    rig_hash: str
    parameters: int
    landmarks: int
    calibrated: bool
    origin: Literal["spec", "shipped", "kept", "found"]
    warnings: list[Text]


class PhotoParams(Params):
    path: AbsolutePath
    face: Index | None = None
    landmark_file: AbsolutePath | None = None


class FitParams(Params):
    rig_hash: Text
    photos: Annotated[list[PhotoParams], Field(min_length=1, max_length=MAX_PHOTOS)]
    solve: Literal["both", "identity", "expression"] = "both"
    locks: Values = {}
    initial: Values = {}
    focal_mm: Number | None = None


class FitResultMessage(Result):
    fit_id: str
    fit: dict[Text, Any]


class VerifyParams(Params):
    fit_id: Text
    blend: AbsolutePath
    objects: Objects | None = None
    metres_per_unit: Positive | None = None
    values: Values
    photo: Index = 0
    spec: AbsolutePath | None = None
    blender: AbsolutePath | None = None
    gpu: bool = False


class VerifyResult(Result):
    face_found: bool
    landmark_error_percent: float | None
    blender_version: str
    seconds: float


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """kind: "hello" before everything else, "at once" by the event loop, "job" in the queue. blobs: arrays of the result;
    `_i`: one a photo."""

    name: str
    kind: Literal["hello", "at once", "job"]
    params: type[Params]
    result: type[Result]
    blobs: tuple[str, ...] = ()


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("hello", "hello", HelloParams, HelloResult),
        Method("authenticate", "hello", AuthenticateParams, Done),
        Method("ping", "at once", Nothing, PingResult),
        Method("cancel", "at once", CancelParams, CancelResult),
        Method("shutdown", "at once", Nothing, Done),
        Method("doctor", "job", DoctorParams, DoctorResult),
        Method("rig.default", "job", DefaultRigParams, DefaultRigResult),
        Method("rig.register", "job", RegisterParams, RegisterResult),
        Method("fit", "job", FitParams, FitResultMessage, ("photo_i", "landmarks_i")),
        Method("verify", "job", VerifyParams, VerifyResult, ("render", "over")),
    )
}


def read_params(method: Method, params: Any) -> Params:
    """Checked parameters. BadParamsError says which one is wrong and why."""
    if not isinstance(params, dict):
        raise BadParamsError(f"{method.name}: the parameters have to be an object.")
    try:
        return method.params.model_validate(params)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"]) or "its parameters"
        reason = first["msg"].removeprefix("Value error, ")
        raise BadParamsError(f"{method.name}: {where}: {reason[:200]}.") from None


def signature(model: type[BaseModel]) -> str:
    """A model as docs/protocol.md writes it: `{path, face?, landmark_file?}`."""
    return "{" + ", ".join(_field(name, info) for name, info in model.model_fields.items()) + "}"


def _field(name: str, info: Any) -> str:
    mark = "" if info.is_required() else "?"
    inside = [one for one in get_args(info.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
    return f"{name}{mark}: [{signature(inside[0])}]" if inside else f"{name}{mark}"
