"""What one end shows is of use to nobody else."""

from __future__ import annotations

from app.challenge import NONCE_BYTES, new_nonce, proof, proves


def test_a_proof_is_of_one_secret_role_hello_and_nonce() -> None:
    hello, nonce = new_nonce(), new_nonce()
    shown = proof(b"secret", b"a", hello, nonce)
    assert proves(shown, b"secret", b"a", hello, nonce)
    for other in ((b"other", b"a", hello, nonce), (b"secret", b"b", hello, nonce), (b"secret", b"a", nonce, hello)):
        assert not proves(shown, *other)
    assert not proves(b"", b"secret", b"a", hello, nonce)
    assert len(hello) == NONCE_BYTES
    assert hello != nonce
