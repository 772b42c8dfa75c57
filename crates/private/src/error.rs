//! The ways private inference can fail.

use std::io;

use fornax_compute::Need;

use crate::frame::Party;

/// Why a session could not be opened or went wrong. The values are those a person needs to act.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Both parties would be the same server.
    #[error(
        "party 0 and party 1 are the same server, {address}: one process that has both shares has everything"
    )]
    SameParty {
        /// Where both are.
        address: String,
    },
    /// Both parties are on one machine and nobody said that this is a demonstration.
    #[error(
        "party 0 and party 1 are on one host, {host}: its owner sees both shares, so there is no privacy; --demo-single-host does it all the same"
    )]
    SingleHost {
        /// The host.
        host: String,
    },
    /// A server that was started as a demonstration, and a client that was not told so.
    #[error(
        "party {party} says that it is a demonstration on one host, which protects nothing; --demo-single-host does it all the same"
    )]
    Demonstration {
        /// Which server.
        party: Party,
    },
    /// An address that cannot be connected to as it is written.
    #[error("{url:?} is not an address of a party: {reason}")]
    Address {
        /// What was given.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Certificates or keys that cannot be used.
    #[error("TLS: {0}")]
    Tls(String),
    /// A server that says it is the other party.
    #[error("{url} serves party {got}, not party {wanted}")]
    WrongParty {
        /// Where.
        url: String,
        /// What it should be.
        wanted: Party,
        /// What it says.
        got: Party,
    },
    /// A server with other rules.
    #[error(
        "party {party} speaks {got}, this client speaks {wanted}: use the same version of Fornax on both sides"
    )]
    Protocol {
        /// Which server.
        party: Party,
        /// What it speaks.
        got: String,
        /// What is spoken here.
        wanted: String,
    },
    /// Weights that are not the client's.
    #[error(
        "{left} has weights {left_hash}, {right} has {right_hash}: all three need the same model file and the same quantisation"
    )]
    WeightsDiffer {
        /// One of the three.
        left: &'static str,
        /// Its hash.
        left_hash: String,
        /// Another one.
        right: &'static str,
        /// Its hash.
        right_hash: String,
    },
    /// A weight that products in the ring cannot be exact with.
    #[error(
        "matrix {matrix}, row {row}: its {columns} weights sum to {sum} in magnitude, which leaves activations {bound} steps of the ring of 2^32; at least {least} are needed"
    )]
    Overflow {
        /// Which matrix, in the order in which the model loads them.
        matrix: usize,
        /// Its heaviest row.
        row: usize,
        /// Values of the row.
        columns: usize,
        /// Sum of the magnitudes of its weights.
        sum: u64,
        /// The largest activation that cannot wrap.
        bound: u64,
        /// The smallest that is worth computing with.
        least: u64,
    },
    /// A matrix that a frame cannot carry a row of.
    #[error("matrix {matrix} of {rows} x {columns} does not fit a frame of {limit} bytes")]
    MatrixSize {
        /// Which matrix.
        matrix: usize,
        /// Its rows.
        rows: usize,
        /// Its columns.
        columns: usize,
        /// The largest frame.
        limit: usize,
    },
    /// A stored weight that is no number.
    #[error("matrix {matrix}, row {row} holds {value}")]
    Weight {
        /// Which matrix.
        matrix: usize,
        /// Which row.
        row: usize,
        /// The value.
        value: f32,
    },
    /// A server that says no.
    #[error("party {party} refused: {reason}")]
    Refused {
        /// Which server.
        party: Party,
        /// What it said.
        reason: String,
    },
    /// A connection that broke, and could not be made again.
    #[error("party {party} is lost: {reason}")]
    Lost {
        /// Which server.
        party: Party,
        /// What the system said.
        reason: io::Error,
    },
    /// A server that did not answer in time.
    #[error("party {party} did not answer within {seconds} seconds")]
    Late {
        /// Which server.
        party: Party,
        /// How long was waited.
        seconds: u64,
    },
    /// A server that sent what the protocol does not allow.
    #[error("party {party} broke the protocol: {what}")]
    Violation {
        /// Which server.
        party: Party,
        /// What it sent.
        what: String,
    },
    /// A product that is wrong, and who it is from, by the client's own computation.
    #[error("party {liars} answered the product with matrix {matrix} wrongly; the session is over")]
    Wrong {
        /// `0`, `1` or `0 and 1`.
        liars: &'static str,
        /// Which matrix.
        matrix: usize,
    },
    /// A wrong sum although both answers are right: the client's own weights changed.
    #[error(
        "the product with matrix {matrix} failed its check, but both answers are right: this machine's copy of the weights is damaged"
    )]
    Unexplained {
        /// Which matrix.
        matrix: usize,
    },
    /// An earlier answer was wrong: nothing more is sent.
    #[error("no more is sent: {0}")]
    Distrusted(String),
    /// A mask stream at its end.
    #[error("the mask stream ends after {limit} words; {wanted} more after {used} would repeat it")]
    Exhausted {
        /// Words drawn.
        used: u64,
        /// Words wanted.
        wanted: u64,
        /// Words that there are.
        limit: u64,
    },
    /// More products than a session was opened for.
    #[error("the session was opened for {limit} positions; {wanted} are beyond it")]
    Positions {
        /// Positions with this product.
        wanted: u64,
        /// What was agreed.
        limit: u64,
    },
    /// A frame that is not what it says.
    #[error("{0}")]
    Frame(#[from] crate::frame::FrameError),
    /// A recorded file that is none.
    #[error("{path}: {what}")]
    Transcript {
        /// The file.
        path: String,
        /// What is wrong with it.
        what: String,
    },
    /// The operating system.
    #[error("{what}: {reason}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What it said.
        reason: io::Error,
    },
    /// The CPU backend below.
    #[error(transparent)]
    Compute(#[from] fornax_compute::Error),
}

impl Error {
    /// Whether somebody answered what cannot be right.
    pub fn is_integrity(&self) -> bool {
        matches!(
            self,
            Error::Wrong { .. } | Error::Violation { .. } | Error::Unexplained { .. } | Error::Distrusted(_)
        )
    }
}

/// The backend's name in messages.
pub(crate) const NAME: &str = "private";

/// Refuses experts: whoever multiplies by the weights of those that were chosen knows who was chosen. And adapters and
/// matrices of single heads, whose products no server has.
pub(crate) fn supports(need: Need) -> Result<(), fornax_compute::Error> {
    let what = match need {
        Need::Experts => {
            format!("{need} (which of them a token takes would tell the servers about the token)")
        }
        Need::LowRank | Need::Latent | Need::Floats8 => need.to_string(),
        _ => return Ok(()),
    };
    Err(fornax_compute::Error::Unsupported { what, backend: NAME })
}

impl From<Error> for fornax_compute::Error {
    fn from(error: Error) -> fornax_compute::Error {
        let reason = error.to_string();
        match error {
            Error::Compute(error) => error,
            error if error.is_integrity() => fornax_compute::Error::Integrity { backend: NAME, reason },
            Error::Overflow { .. } | Error::MatrixSize { .. } | Error::Weight { .. } => {
                fornax_compute::Error::Inexact { reason }
            }
            _ => fornax_compute::Error::Device { backend: NAME, operation: "product", reason },
        }
    }
}
