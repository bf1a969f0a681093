//! Tokens: what a caller over HTTP shows, and what it may do.

use ax_shared::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// What a caller may do; each role may all that those before it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Sees everything.
    Viewer,
    /// Starts, pauses and resumes what is defined.
    Operator,
    /// Defines tasks.
    Admin,
}

impl Role {
    /// The role as a word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }

    /// Reads a role.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Viewer, Self::Operator, Self::Admin].into_iter().find(|role| role.as_str() == word)
    }
}

/// The SHA-256 of a token, which is all that is kept of it. A token is 256 random bits, so no list of likely ones can be
/// tried, and a slow hash would add nothing. Looking a hash up takes a time that tells something about the hash at
/// most, from which nobody can tell the token.
pub type TokenHash = [u8; 32];

/// A token, without its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// What it is called, in the audit too. Unique among those that have not been revoked.
    pub name: String,
    /// What its bearer may do.
    pub role: Role,
    /// Of the secret.
    pub hash: TokenHash,
    /// When it was made.
    pub created_at: Timestamp,
    /// From when on it is refused; none = never.
    pub expires_at: Option<Timestamp>,
}

/// What goes before the random part of a token, so that people and scanners know one when they see it.
const MARK: &str = "ax_";

/// The text of a token: a mark and 256 random bits.
#[must_use]
pub fn secret(random: [u8; 32]) -> String {
    format!("{MARK}{}", data_encoding::BASE64URL_NOPAD.encode(&random))
}

/// The hash of a token's text.
#[must_use]
pub fn hash(secret: &str) -> TokenHash {
    Sha256::digest(secret.as_bytes()).into()
}

/// Checks what a token is to be called: 1 to 64 characters out of `A–Z a–z 0–9 . _ @ -`.
///
/// # Errors
/// The rule.
pub fn check_name(name: &str) -> Result<(), &'static str> {
    let plain = |c: u8| c.is_ascii_alphanumeric() || b"._@-".contains(&c);
    if (1..=64).contains(&name.len()) && name.bytes().all(plain) {
        Ok(())
    } else {
        Err("a name has 1 to 64 characters out of A–Z a–z 0–9 . _ @ -")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_ordered_and_written_as_they_are_read() {
        assert!(Role::Viewer < Role::Operator && Role::Operator < Role::Admin);
        for role in [Role::Viewer, Role::Operator, Role::Admin] {
            assert_eq!(Role::parse(role.as_str()), Some(role));
            assert_eq!(serde_json::to_value(role).unwrap(), role.as_str());
        }
        assert_eq!(Role::parse("root"), None);
    }

    #[test]
    fn a_token_is_safe_in_a_header_and_known_by_its_hash() {
        let text = secret([0xfb; 32]);
        assert_eq!(text.len(), 46);
        assert!(text.starts_with("ax_") && text.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_' || c == b'-'));
        assert_eq!(hash(&text), hash(&text.clone()));
        assert_ne!(hash(&text), hash(&secret([0xfa; 32])));
        // FIPS 180-2, appendix B.1.
        assert_eq!(data_encoding::HEXLOWER.encode(&hash("abc"))[..16], *"ba7816bf8f01cfea");
    }

    #[test]
    fn names_fit_into_one_word() {
        for good in ["ci", "ops@example.org", "a.b_c-d", &"x".repeat(64)] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        for bad in ["", "a b", "a\n", "ä", &"x".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
