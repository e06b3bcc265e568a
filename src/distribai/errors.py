"""One tree of exceptions, for people.

::

    DistribAIError                 code, message, hint, HTTP status, exit status
    ├── UsageError                 the caller's words are wrong            400 / exit 2
    │   ├── InvalidSpec            a recipe or spec that cannot be run     422 / exit 2
    │   └── InvalidData            data that cannot be trained on          422 / exit 2
    ├── NotAllowed                 no or wrong credentials                 401/403 / exit 4
    ├── NotFound                   nothing by that name                    404 / exit 3
    ├── Ambiguous                  more than one by that name              409 / exit 3
    ├── Conflict                   the object's state forbids it           409 / exit 5
    ├── Integrity                  bytes that do not match their hash      422 / exit 6
    ├── ProtocolMismatch           the two sides speak other versions      426 / exit 7
    ├── Unavailable                the other side cannot be reached        503 / exit 8
    │   └── TooMany                the caller asks too often               429 / exit 8
    └── InternalFault              a promise of ours is broken             500 / exit 70

Every error carries a stable ``code`` in dotted lower case (``spec.steps``), a message that says
what happened and why, and a hint that says what to try. Codes never change their meaning; they are
listed in :data:`CODES` with one sentence each, from which the docs are generated. Raise the class
with a code from that table: an unknown code is refused at once, so the table cannot drift.
"""

from __future__ import annotations

from typing import ClassVar

CODES: dict[str, str] = {}
"""Every stable error code, with the sentence that the docs print. Filled by :func:`register`."""


def register(**codes: str) -> None:
    """Add codes to :data:`CODES`; ``__`` in a keyword stands for the dot.

    Raises:
        ValueError: a code is registered twice with different sentences.
    """
    for key, sentence in codes.items():
        code = key.replace("__", ".")
        if CODES.setdefault(code, sentence) != sentence:
            raise ValueError(f"error code {code} is registered twice")


class DistribAIError(Exception):
    """Base of everything that the product raises on purpose.

    Args:
        code: a key of :data:`CODES`.
        message: what happened and why, one sentence, with the offending value.
        hint: what to try next; empty when there is nothing sensible to say.
        field: dotted path of the offending field of a request or recipe, if there is one.
    """

    http_status: ClassVar[int] = 500
    exit_status: ClassVar[int] = 1

    def __init__(self, code: str, message: str, hint: str = "", *, field: str = "") -> None:
        if code not in CODES:
            raise ValueError(f"unregistered error code {code!r}")
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.field = field

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


class UsageError(DistribAIError):
    """The caller asked for something that cannot be understood."""

    http_status = 400
    exit_status = 2


class InvalidSpec(UsageError):
    """A recipe or job spec that cannot be run as written."""

    http_status = 422


class InvalidData(UsageError):
    """Data that cannot be trained on: missing, empty, not UTF-8, too short."""

    http_status = 422


class NotAllowed(DistribAIError):
    """No credentials, wrong credentials, or not the right ones for this."""

    http_status = 403
    exit_status = 4


class Unauthenticated(NotAllowed):
    """No credentials, or credentials that nobody issued."""

    http_status = 401


class NotFound(DistribAIError):
    """Nothing goes by that name."""

    http_status = 404
    exit_status = 3


class Ambiguous(DistribAIError):
    """More than one object goes by that name."""

    http_status = 409
    exit_status = 3


class Conflict(DistribAIError):
    """The object's present state forbids the change."""

    http_status = 409
    exit_status = 5


class Integrity(DistribAIError):
    """Bytes that do not match their declared hash or size."""

    http_status = 422
    exit_status = 6


class ProtocolMismatch(DistribAIError):
    """The two sides speak versions that do not fit."""

    http_status = 426
    exit_status = 7


class Unavailable(DistribAIError):
    """The other side cannot be reached or cannot answer now; trying again later may help."""

    http_status = 503
    exit_status = 8


class TooMany(Unavailable):
    """The caller asks too often; ``retry_after`` is in how many seconds it may ask again."""

    http_status = 429

    def __init__(
        self, code: str, message: str, hint: str = "", *, field: str = "", retry_after: float = 1.0
    ) -> None:
        super().__init__(code, message, hint, field=field)
        self.retry_after = retry_after


class InternalFault(DistribAIError):
    """A promise of ours is broken; this is a defect to report."""

    http_status = 500
    exit_status = 70


register(
    usage__invalid="The command line or request could not be understood.",
    usage__declined="The person who was asked said no.",
    usage__format="The output format is unknown.",
    spec__invalid="The recipe or spec has an unknown, missing or ill-typed field.",
    spec__steps="`steps` must be a positive number of inner steps.",
    spec__model="The model's architecture is not possible (dimensions, heads, sizes).",
    spec__model_too_large="The model is larger than this grid plans for.",
    spec__unused_knob="A model knob was given that the family would ignore.",
    spec__paradigm="The paradigm is unknown or not available.",
    spec__workers="workers_min and workers_max do not form a range.",
    spec__plan="The job cannot be planned with these figures.",
    data__missing="A data file or built-in data set does not exist.",
    data__empty="The data has no text in it.",
    data__not_utf8="The data is not UTF-8 text.",
    data__malformed="The data is not in the format it claims (JSONL, tokenizer JSON).",
    data__too_short="The data is shorter than one training sequence plus the held-out split.",
    auth__missing="The request carries no credentials.",
    auth__invalid="The credentials are unknown, expired or revoked.",
    auth__forbidden="These credentials may not do that.",
    auth__kept="The key of this machine's own grid is kept, unless it is said to be replaced.",
    people__name="No account or organization can have that name.",
    people__role="That role cannot be given there.",
    people__policy="The acceptance policy cannot be followed as it stands.",
    people__quota="The quota has an impossible figure.",
    people__last_operator="The grid would be left without an operator.",
    account__unknown="No account has that id or name.",
    account__taken="Another account has that name.",
    account__closed="The account is closed.",
    organization__unknown="No organization has that id or name.",
    organization__taken="Another organization has that name.",
    organization__choose="It must be said for which organization the job is.",
    key__unknown="No key has that id.",
    key__scope="A key makes no key that may do more, or lasts longer, than itself.",
    invite__unknown="No invite has that id.",
    quota__jobs="The organization has as many open jobs as it may have.",
    quota__steps="The job asks for more steps than its organization may.",
    quota__tokens="The job asks for more tokens than its organization may.",
    quota__bytes="The organization stores as many bytes as it may.",
    job__unknown="No job has that id or name.",
    job__ambiguous="More than one job matches that id or name.",
    job__state="The job's state does not allow this.",
    job__no_weights="The job has no weights of that version yet.",
    state__transition="The state machine has no such transition.",
    task__unknown="No task has that id.",
    task__not_held="The node reports for a task or attempt that it does not hold.",
    task__failed="The task failed on its node.",
    task__rejected="The submission does not fit its task, or its figures contradict each other.",
    task__superseded="The result came too late for any round; its samples are trained again.",
    task__cancelled="The task was cancelled.",
    task__declined="The node would not take the task.",
    task__lost="The node that held the task fell silent or went away.",
    task__let_go="The node no longer has the task: it left, or came back without it.",
    task__timeout="Nobody answered in time.",
    blob__hash="The bytes do not match the declared hash.",
    blob__size="The upload has another size than declared, or is too large.",
    blob__truncated="The upload ended before its declared size.",
    blob__unknown="No blob or upload has that name.",
    blob__offset="The upload continues at another offset.",
    blob__store="The blob store (disk or object store) cannot take or give bytes now.",
    tensor__manifest="The tensors differ from the parameter manifest.",
    tensor__format="The file is not a well-formed safetensors file.",
    tensor__nonfinite="The tensors contain NaN or infinity.",
    merge__empty="No submission of the round carries tokens, so there is nothing to merge.",
    codec__unknown="The codec is unknown.",
    protocol__version="Node and orchestrator speak protocol versions that do not fit.",
    protocol__sequence="A message arrived out of order or was lost.",
    protocol__malformed="A message lacks what it must carry.",
    protocol__backlog="The other side has not acknowledged what it was sent.",
    node__unknown="No node has that id or name.",
    node__ambiguous="More than one node matches that id or name.",
    node__key="The node's key or signature is not valid.",
    node__certificate="The certificate is not this node's, or none can be signed for it.",
    node__invite="The join link's invite is unknown, used up or expired.",
    node__quarantined="The node is quarantined: the operator has to look at it first.",
    node__banned="The node's key is shut out of the grid.",
    node__standing="The node's standing does not allow this.",
    node__fenced="A newer session of the same node key has taken over.",
    node__child="The training process ended without an answer.",
    node__memory="The machine has too little memory for the task.",
    node__torch="The training packages are not installed on this machine.",
    node__link="The join link is not well formed.",
    node__month="The bytes that a machine's owner gives each month are used up.",
    node__join="The node has not joined a grid yet.",
    node__locked="Another node daemon already runs in this state directory.",
    grid__locked="An orchestrator already runs on this database.",
    grid__port="The port is already in use.",
    grid__ca="The grid's certificate authority is another one than was promised, or is none.",
    grid__blobs="The blob store is empty, or another grid's.",
    grid__keys="The grid's key files are missing, damaged, or another grid's.",
    grid__unreachable="The orchestrator cannot be reached.",
    grid__database="The database cannot be reached.",
    grid__schema="The database's schema is newer than this program.",
    grid__missing="There is no grid at that place.",
    grid__moved="The grid was moved away from this database.",
    grid__damaged="The grid's own stored bytes are missing or damaged.",
    grid__backup="The directory holds no finished backup, or the backup is damaged.",
    grid__not_empty="There is a grid already where one shall be restored.",
    config__invalid="A setting has an unknown name or an impossible value.",
    webhook__unknown="No webhook has that id.",
    webhook__url="The webhook's address is not an address that deliveries can go to.",
    webhook__key="The webhook was made with another key than this process has.",
    webhook__state="The webhook's state does not allow this.",
    events__slow="The reader of an event stream did not read for too long.",
    events__full="This process serves as many event streams as it can.",
    http__idempotency="The idempotency key was used for another request.",
    http__path="The HTTP interface has no such path.",
    http__method="The path exists, but does not take that method.",
    limit__rate="Too many requests or messages in a short time.",
    http__too_large="The request is larger than the interface takes.",
    io__file="A file could not be read or written.",
    internal__fault="A defect in DistribAI; please report it.",
)
