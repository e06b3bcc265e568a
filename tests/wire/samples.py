"""One fully populated instance of every message, from fixed values."""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from distribai.wire.v1 import distribai_pb2 as pb

_SCALARS = {
    FieldDescriptor.CPPTYPE_UINT32: lambda n: 1000 + n,
    FieldDescriptor.CPPTYPE_UINT64: lambda n: 2**40 + n,
    FieldDescriptor.CPPTYPE_DOUBLE: lambda n: n + 0.25,
    FieldDescriptor.CPPTYPE_BOOL: lambda n: True,
}


def _scalar(field: FieldDescriptor, salt: int) -> object:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes(range(field.number, field.number + 32))
    if field.type == FieldDescriptor.TYPE_STRING:
        return f"{field.name}-{salt}"
    return _SCALARS[field.cpp_type](field.number + salt)


def _fill(message: Message, salt: int = 0) -> Message:
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof is not None:
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            kind = field.message_type.fields_by_name["value"]
            value["key-a"] = _scalar(kind, 1)
            value["key-b"] = _scalar(kind, 2)
        elif field.is_repeated and field.message_type is not None:
            _fill(value.add(), salt + 1)
            _fill(value.add(), salt + 2)
        elif field.is_repeated:
            value.extend([_scalar(field, salt + 1), _scalar(field, salt + 2)])
        elif field.message_type is not None:
            _fill(value, salt)
        else:
            setattr(message, field.name, _scalar(field, salt))
    return message


def every_message() -> dict[str, Message]:
    """By golden file name: each message type, and each envelope once per body."""
    found: dict[str, Message] = {}
    for name, descriptor in sorted(pb.DESCRIPTOR.message_types_by_name.items()):
        kind = getattr(pb, name)
        if not descriptor.oneofs:
            found[name] = _fill(kind())
            continue
        for body in descriptor.oneofs_by_name["body"].fields:
            envelope = kind(seq=7, ack=5)
            _fill(getattr(envelope, body.name))
            found[f"{name}.{body.name}"] = envelope
    return found
