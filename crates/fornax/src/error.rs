//! The ways running a model can fail, and the code that programs know each by. Crates below this one that know no
//! requests have errors without codes, which get theirs here.

use fornax_code::Code;

use crate::units::binary;

/// Why a model could not be opened or run. Each message is one line that says what to do where something can be done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model's files.
    #[error(transparent)]
    Format(#[from] fornax_format::Error),
    /// The model's architecture or weights.
    #[error(transparent)]
    Model(#[from] fornax_model::Error),
    /// The tokenizer or the chat template.
    #[error(transparent)]
    Text(#[from] fornax_text::Error),
    /// A file that cannot be quantised.
    #[error(transparent)]
    Quantize(#[from] crate::quantize::QuantizeError),
    /// A model that cannot be converted.
    #[error(transparent)]
    Convert(#[from] crate::convert::ConvertError),
    /// A file that cannot be made.
    #[error(transparent)]
    NewFile(#[from] crate::NewFileError),
    /// An adapter that cannot be loaded now.
    #[error(transparent)]
    Adapter(#[from] fornax_engine::AdapterRefusal),
    /// The device.
    #[error(transparent)]
    Compute(#[from] fornax_compute::Error),
    /// What pages are kept with on a disk.
    #[error(transparent)]
    KvDisk(#[from] fornax_disk::Error),
    /// Pages are to be kept on a disk that nothing would ever be read from.
    #[error("--kv-disk is not available {reason}")]
    NoKvDisk {
        /// Where, and why.
        reason: String,
    },
    /// The servers of private inference.
    #[error(transparent)]
    Private(#[from] fornax_private::Error),
    /// The plan is larger than the memory.
    #[error(
        "the model needs {} ({} for weights, {} for keys and values of a context of {context} tokens), but {} may be used; {advice}",
        binary(*.needed), binary(*.weights), binary(*.kv), binary(*.limit)
    )]
    DoesNotFit {
        /// Bytes of the whole plan.
        needed: u64,
        /// Bytes of its weights.
        weights: u64,
        /// Bytes of its KV cache.
        kv: u64,
        /// Tokens that the KV cache holds.
        context: usize,
        /// Bytes that may be used.
        limit: u64,
        /// What would fit.
        advice: String,
    },
    /// A context longer than the model can be asked for.
    #[error(
        "a context of {asked} tokens is more than the {trained} that the model was made for; use a smaller --context"
    )]
    ContextTooLong {
        /// Tokens asked for.
        asked: usize,
        /// Tokens that the model knows.
        trained: usize,
    },
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {prompt} tokens, but the context holds {context}, one of them for the answer; shorten it{}",
        longer(*.context, *.trained)
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that the context holds.
        context: usize,
        /// The longest context that the model was made for.
        trained: usize,
    },
    /// Prompt and answer together exceed the context.
    #[error(
        "the prompt has {prompt} tokens and {max_tokens} more are asked for, but the context holds {context}; ask for at most {left}{}",
        longer(*.context, *.trained)
    )]
    RequestTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// Tokens that the context holds.
        context: usize,
        /// Tokens that the prompt leaves.
        left: usize,
        /// The longest context that the model was made for.
        trained: usize,
    },
    /// An answer of a model that has none.
    #[error("the model makes embeddings and no answers; use `fornax embed`")]
    Embeds,
    /// Nothing to compute on.
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,
    /// A token id that the model does not have.
    #[error("token {token} at position {position} is not in the vocabulary of {vocab}; use ids below that")]
    UnknownToken {
        /// The id.
        token: u32,
        /// Where it stands in the prompt.
        position: usize,
        /// How many ids there are.
        vocab: usize,
    },
    /// A text for a model that knows only ids.
    #[error("the model has no tokenizer; give --tokens instead of text")]
    NoTokenizer,
    /// The model has no chat template that works.
    #[error("{reason}")]
    ChatTemplate {
        /// What is wrong with it.
        reason: String,
    },
    /// Parts of a chat are wrong or cannot be had together.
    #[error("{reason}")]
    Chat {
        /// Which, and why.
        reason: String,
    },
    /// The model cannot be told of tools, or its calls cannot be read.
    #[error("the chat template {reason}")]
    ToolsUnsupported {
        /// What is wrong with it.
        reason: String,
    },
    /// The engine does not take the request.
    #[error(transparent)]
    Refused(#[from] fornax_engine::Refusal),
    /// The engine took the request and failed it.
    #[error(transparent)]
    Engine(fornax_engine::Failure),
    /// The form cannot be followed.
    #[error("{0}")]
    Form(fornax_form::FormError),
    /// The answer was cut before its form was complete.
    #[error(
        "the answer was cut after {tokens} tokens, before its form was complete; allow more --max-tokens, or ask for less"
    )]
    OutputTruncated {
        /// Tokens that there were.
        tokens: usize,
    },
    /// Nothing may be chosen.
    #[error(
        "no token may be chosen at position {position}: form, allowed and banned tokens and min_tokens exclude each other"
    )]
    NothingAllowed {
        /// The position that no token may take.
        position: usize,
    },
    /// More stop strings than are watched for.
    #[error("{stops} stop strings; at most {most}")]
    TooManyStops {
        /// How many there are.
        stops: usize,
        /// How many there may be.
        most: usize,
    },
    /// A stop string that would hold back too much of a stream.
    #[error("stop string {index} has {bytes} bytes; at most {most}")]
    StopTooLong {
        /// Which of them.
        index: usize,
        /// Its length.
        bytes: usize,
        /// The longest possible.
        most: usize,
    },
    /// A stop string could cut a form.
    #[error("a stop string would cut the form before it is complete; use one of them")]
    StopInForm,
    /// NaN or infinity where the model's opinion should be.
    #[error(
        "the logits after token {position} hold NaN or infinity; the weights are damaged or the model overflows: fetch it again, or try --activations float --kv-dtype f32"
    )]
    NumericFault {
        /// Index of the last token computed.
        position: usize,
    },
    /// A picture that cannot be read, or a processor that does something else.
    #[error(transparent)]
    Picture(#[from] fornax_image::Error),
    /// A picture was not seen, through no fault of its own.
    #[error("{reason}")]
    Unseen {
        /// Why.
        reason: String,
    },
    /// A picture's file that cannot be opened.
    #[error("image {}: {error}", path.display())]
    Image {
        /// Where it should be.
        path: std::path::PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// A file beside a model that has its own tower.
    #[error("{} goes with a model in GGUF; this one has what reads images in its own folder", path.display())]
    Projector {
        /// The file.
        path: std::path::PathBuf,
    },
    /// A tokenizer without the token that stands for a picture.
    #[error(
        "the tokenizer has no token {name:?}, which stands for an image; --no-images loads the model without them"
    )]
    NoPlaceholder {
        /// The token's text.
        name: &'static str,
    },
    /// A model that cannot draft for another one.
    #[error("{} cannot draft for {}: {reason}", draft.display(), model.display())]
    Draft {
        /// The one that should draft.
        draft: std::path::PathBuf,
        /// The one that it should draft for.
        model: std::path::PathBuf,
        /// Why it cannot.
        reason: String,
    },
    /// A thread that the system does not give.
    #[error("no thread for {what}: {error}")]
    Thread {
        /// What it is for.
        what: &'static str,
        /// What the system says.
        error: std::io::Error,
    },
    /// The caller stopped it.
    #[error("stopped before it was done")]
    Cancelled,
}

impl Error {
    /// What programs know this error by.
    pub fn code(&self) -> Code {
        match self {
            Error::Format(error) => format_code(error),
            Error::Model(error) => model_code(error),
            Error::Text(error) => text_code(error),
            Error::Quantize(error) => quantize_code(error),
            Error::Convert(_) => Code::ModelUnsupported,
            Error::NewFile(error) => new_file_code(error),
            Error::Adapter(refusal) => adapter_code(refusal),
            Error::Compute(error) => compute_code(error),
            Error::KvDisk(_) | Error::NoKvDisk { .. } => Code::InvalidInput,
            Error::Private(error) => private_code(error),
            Error::DoesNotFit { .. } => Code::ModelDoesNotFit,
            Error::PromptTooLong { .. } | Error::RequestTooLong { .. } => Code::PromptTooLong,
            Error::ContextTooLong { .. }
            | Error::EmptyPrompt
            | Error::Embeds
            | Error::UnknownToken { .. }
            | Error::NoTokenizer
            | Error::NothingAllowed { .. }
            | Error::TooManyStops { .. }
            | Error::StopTooLong { .. }
            | Error::StopInForm
            | Error::Chat { .. }
            | Error::ChatTemplate { .. } => Code::InvalidInput,
            Error::ToolsUnsupported { .. } => Code::ModelUnsupported,
            Error::Refused(refusal) => refusal.code(),
            Error::Engine(failure) => failure.code(),
            Error::Form(error) => error.code(),
            Error::OutputTruncated { .. } => Code::OutputTruncated,
            Error::NumericFault { .. } => Code::NumericFault,
            Error::Cancelled => Code::Cancelled,
            Error::Picture(fornax_image::Error::Processor { .. }) | Error::NoPlaceholder { .. } => {
                Code::ModelUnsupported
            }
            Error::Picture(_) | Error::Image { .. } | Error::Projector { .. } | Error::Draft { .. } => {
                Code::InvalidInput
            }
            Error::Unseen { .. } => Code::Internal,
            Error::Thread { .. } => Code::OutOfMemory,
        }
    }
}

impl From<fornax_chat::Error> for Error {
    fn from(error: fornax_chat::Error) -> Error {
        use fornax_chat::Error as Fault;
        match error {
            Fault::Asked(_) => Error::Chat { reason: error.to_string() },
            Fault::NoTemplate(reason) => Error::ChatTemplate { reason },
            Fault::ToolsUnsupported(reason) => Error::ToolsUnsupported { reason },
            Fault::Form(error) | Fault::Said { error, .. } => Error::Form(error),
            Fault::Unseen(fornax_chat::Unseen::GivenUp) => Error::Cancelled,
            Fault::Unseen(unseen) => Error::Unseen { reason: unseen.to_string() },
            Fault::Refused(refusal) => Error::Refused(refusal),
            Fault::Text(error) => Error::Text(error),
        }
    }
}

/// What else helps against a context that is too short: a longer one, where the model has it.
fn longer(context: usize, trained: usize) -> String {
    if context < trained {
        format!(" or use a larger --context, of at most {trained}")
    } else {
        "; the model was made for no more".to_owned()
    }
}

fn private_code(error: &fornax_private::Error) -> Code {
    use fornax_private::Error as Fault;
    match error {
        error if error.is_integrity() => Code::IntegrityFailure,
        Fault::WeightsDiffer { .. } => Code::WeightsDiffer,
        Fault::Overflow { .. } | Fault::MatrixSize { .. } | Fault::Weight { .. } => Code::ModelUnsupported,
        Fault::Lost { .. } | Fault::Late { .. } | Fault::Refused { .. } => Code::DeviceUnavailable,
        Fault::Compute(error) => compute_code(error),
        Fault::System { .. } | Fault::Exhausted { .. } | Fault::Frame(_) => Code::Internal,
        // Parties, addresses, certificates and files as they were given.
        _ => Code::InvalidInput,
    }
}

fn format_code(error: &fornax_format::Error) -> Code {
    use fornax_format::Error as Fault;
    match error.fault() {
        Fault::NotFound | Fault::NoModel | Fault::SeveralModels { .. } | Fault::Io(_) | Fault::NotAFile => {
            Code::ModelNotFound
        }
        Fault::ConfigMissing | Fault::WeightsMissing { .. } | Fault::ShardMissing { .. } => {
            Code::ModelNotFound
        }
        Fault::BigEndian { .. }
        | Fault::Version { .. }
        | Fault::Module { .. }
        | Fault::TensorType { .. }
        | Fault::TensorTypeName { .. }
        | Fault::Quantization { .. }
        | Fault::PackedRows { .. } => Code::ModelUnsupported,
        Fault::QuantizeGguf | Fault::NoFloats8 => Code::InvalidInput,
        _ => Code::ModelCorrupt,
    }
}

fn model_code(error: &fornax_model::Error) -> Code {
    use fornax_model::Error as Fault;
    match error {
        Fault::Unsupported { .. } | Fault::UnknownTensor { .. } | Fault::Adapter { .. } => {
            Code::ModelUnsupported
        }
        Fault::MissingKey { .. }
        | Fault::BadKey { .. }
        | Fault::MissingTensor { .. }
        | Fault::TensorShape { .. }
        | Fault::TensorValue { .. } => Code::ModelCorrupt,
        Fault::Format(error) => format_code(error),
        Fault::Compute(error) => compute_code(error),
    }
}

fn quantize_code(error: &crate::quantize::QuantizeError) -> Code {
    use crate::quantize::QuantizeError as Fault;
    match error {
        Fault::NotGguf { .. }
        | Fault::Requantized { .. }
        | Fault::Importance { .. }
        | Fault::ShortText { .. }
        | Fault::NeedsImportance { .. } => Code::InvalidInput,
        Fault::Unsupported { .. } => Code::ModelUnsupported,
    }
}

fn new_file_code(error: &crate::NewFileError) -> Code {
    use crate::NewFileError as Fault;
    match error {
        Fault::DiskFull { .. } => Code::DiskFull,
        Fault::Write { reason, .. } => match reason.kind() {
            std::io::ErrorKind::StorageFull => Code::DiskFull,
            std::io::ErrorKind::Interrupted => Code::Cancelled,
            std::io::ErrorKind::AlreadyExists => Code::InvalidInput,
            _ => Code::Internal,
        },
    }
}

fn adapter_code(refusal: &fornax_engine::AdapterRefusal) -> Code {
    use fornax_engine::AdapterRefusal as Fault;
    match refusal {
        Fault::Full { .. } | Fault::Leaving { .. } => Code::WrongState,
        Fault::Unfit(error) => model_code(error),
        Fault::Failed(failure) => failure.code(),
        Fault::Engine(refusal) => refusal.code(),
    }
}

fn text_code(error: &fornax_text::Error) -> Code {
    use fornax_text::Error as Fault;
    match error {
        Fault::Format(error) => format_code(error),
        Fault::UnsupportedModel { .. } | Fault::UnknownPreTokenizer { .. } | Fault::Unexportable { .. } => {
            Code::ModelUnsupported
        }
        Fault::NoTokenizer => Code::ModelNotFound,
        // What the request brought: a template, a conversation, a stop string, a text.
        Fault::NoTemplate
        | Fault::TemplateSyntax { .. }
        | Fault::TemplateRefused { .. }
        | Fault::TemplateFailed { .. }
        | Fault::Role { .. }
        | Fault::EmptyStop { .. }
        | Fault::Encode { .. } => Code::InvalidInput,
        _ => Code::ModelCorrupt,
    }
}

fn compute_code(error: &fornax_compute::Error) -> Code {
    use fornax_compute::Error as Fault;
    match error {
        Fault::OutOfMemory { .. } => Code::OutOfMemory,
        Fault::DeviceUnavailable { .. } => Code::DeviceUnavailable,
        Fault::DeviceLost { .. } => Code::DeviceLost,
        Fault::DType { .. } | Fault::Inexact { .. } => Code::ModelUnsupported,
        Fault::Integrity { .. } => Code::IntegrityFailure,
        Fault::TensorShape { .. } => Code::ModelCorrupt,
        Fault::Unsupported { .. } | Fault::KvDType { .. } | Fault::SampleParameter { .. } => {
            Code::InvalidInput
        }
        Fault::NumericFault { .. } => Code::NumericFault,
        // Invariants between this crate and the backend, or a system that refuses threads.
        _ => Code::Internal,
    }
}
