"""A certificate authority for one test."""

from pathlib import Path


class Authority:
    """A certificate authority for one test."""

    def __init__(self, folder: Path, name: str) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = name
        self.file = folder / f"{name}-ca.pem"
        self._write(self.file, self._certificate(name, self._key.public_key(), ca=True))

    def issue(self, name: str, *, server: bool = False, since_days: float = 0.0) -> None:
        """Write ``name``.pem and ``name``.key, for a day from ``since_days`` on; a server's is for localhost."""
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certificate(
            "localhost" if server else name, key.public_key(), ca=False, server=server, since_days=since_days
        )
        self._write(self._folder / f"{name}.pem", certificate)
        pem = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
        (self._folder / f"{name}.key").write_bytes(pem)

    def _write(self, file: Path, certificate: object) -> None:
        from cryptography.hazmat.primitives import serialization as form

        file.write_bytes(certificate.public_bytes(form.Encoding.PEM))  # type: ignore[attr-defined]

    def _certificate(
        self, name: str, public: object, *, ca: bool, server: bool = False, since_days: float = 0.0
    ) -> object:
        import datetime

        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import NameOID

        now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=since_days)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)]))
            .public_key(public)  # type: ignore[arg-type]
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)  # type: ignore[arg-type]
        )
        if ca:
            usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
        if server:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        return builder.sign(self._key, hashes.SHA256())
