//! An open model.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{PoisonError, RwLock};

use fornax::{
    Code, Device, Fornax, KvDType, Loading, OpenOptions, Pooling, Prompt, QUANTS, catalog, machine,
    of_length_one,
};
use pyo3::prelude::*;
use serde::Deserialize;

use crate::answer::Answer;
use crate::ask::{self, Fault};
use crate::fault;
use crate::fetch::{Listener, environment};
use crate::process::Owned;

/// How a model is opened, by the names of the command line.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Opening {
    device: String,
    context: Option<usize>,
    parallel: usize,
    threads: Option<usize>,
    quant: Option<String>,
    kv_dtype: Option<String>,
    memory_limit: Option<u64>,
    pooling: Option<String>,
    chat_template: Option<String>,
}

impl Opening {
    /// The options of the facade, or what is wrong with one by its name.
    fn options(self, path: PathBuf) -> Result<OpenOptions, String> {
        let device = match self.device.as_str() {
            "auto" => Device::auto().0,
            name => Device::named(name)
                .ok_or_else(|| format!("device is {name:?}; wanted \"auto\", \"cpu\" or \"cuda:N\""))?,
        };
        let mut options = OpenOptions::new(path).device(device).parallel(self.parallel);
        if device != Device::Cpu
            && let Ok(cache) = catalog::cache_dir(environment)
        {
            options = options.kernel_folder(cache.join("kernels"));
        }
        if let Some(context) = self.context {
            options = options.context(context);
        }
        if let Some(threads) = self.threads {
            options = options.threads(threads);
        }
        if let Some(name) = self.quant {
            let known = QUANTS.iter().find(|(known, _)| *known == name);
            let (_, dtype) = known.ok_or_else(|| {
                format!("quant is {name:?}; wanted one of {}", QUANTS.map(|(name, _)| name).join(", "))
            })?;
            options = options.quantize(*dtype);
        }
        if let Some(name) = self.kv_dtype {
            let known = KvDType::ALL.into_iter().find(|dtype| dtype.to_string() == name);
            let names = || KvDType::ALL.map(|dtype| dtype.to_string()).join(", ");
            let dtype = known.ok_or_else(|| format!("kv_dtype is {name:?}; wanted one of {}", names()))?;
            options = options.kv_dtype(dtype);
        }
        if let Some(name) = self.pooling {
            options = options.pooling(match name.as_str() {
                "mean" => Pooling::Mean,
                "cls" => Pooling::First,
                "last" => Pooling::Last,
                _ => return Err(format!("pooling is {name:?}; wanted mean, cls or last")),
            });
        }
        if let Some(template) = self.chat_template {
            options = options.chat_template(template);
        }
        // What the machine has free is a limit too: beyond it everything else on the machine suffers.
        let available = || if device == Device::Cpu { machine::memory_available() } else { None };
        if let Some(limit) = self.memory_limit.or_else(available) {
            options = options.memory_limit(limit);
        }
        Ok(options)
    }
}

/// Opens the model at a path.
#[pyfunction]
pub(crate) fn open(
    py: Python<'_>,
    path: PathBuf,
    options: &str,
    progress: Option<Py<PyAny>>,
) -> PyResult<Model> {
    let opening: Opening = serde_json::from_str(options)
        .map_err(|error| fault::invalid(py, format!("options of open: {error}")))?;
    if opening.parallel == 0 {
        return Err(fault::invalid(py, "parallel is 0; wanted at least 1".to_owned()));
    }
    let mut listener = Listener::new(progress);
    let opened = py.detach(|| {
        let options = opening.options(path).map_err(Fault::Wrong)?;
        Ok(options.open_with(&mut |loading| {
            // Loading cannot be stopped; what was raised comes out when it is done.
            let _: ControlFlow<()> = match loading {
                Loading::Weights { bytes, total } => listener.tell("loading", bytes, total),
                Loading::Kernels { compiled, total } => {
                    listener.tell("compiling", compiled as u64, total as u64)
                }
            };
        })?)
    });
    let model = opened.map_err(|fault| fault::asked(py, fault));
    let model = listener.outcome(model)?;
    Ok(Model { inner: RwLock::new(Some(Owned::new(model))) })
}

/// An open model, until it is closed. Answers under way outlive that.
#[pyclass(frozen, module = "fornax._fornax")]
pub(crate) struct Model {
    inner: RwLock<Option<Owned<Fornax>>>,
}

impl Model {
    /// The model, shared; an error where it is closed or belongs to another process.
    fn shared(&self, py: Python<'_>) -> PyResult<Fornax> {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        let Some(owned) = &*inner else {
            return Err(fault::raised(
                py,
                Code::ModelNotReady,
                "the model is closed; open it again".to_owned(),
            ));
        };
        owned.get().cloned().ok_or_else(|| fault::forked(py))
    }
}

#[pymethods]
impl Model {
    /// Asks for an answer; both arguments are JSON. What is wrong with them is said before anything is computed.
    fn submit(&self, py: Python<'_>, asked: &str, options: &str) -> PyResult<Answer> {
        let model = self.shared(py)?;
        let answers = py.detach(|| {
            let request = ask::request(asked, options, model.text())?;
            Ok(model.submit(&request)?)
        });
        let answer = answers.map_err(|fault| fault::asked(py, fault))?.pop();
        Ok(Answer::new(answer.expect("one choice, one answer")))
    }

    /// A vector for each text, at length one unless they are wanted raw.
    fn embed(&self, py: Python<'_>, texts: Vec<String>, raw: bool) -> PyResult<Vec<Vec<f32>>> {
        let model = self.shared(py)?;
        let mut listener = Listener::new(None);
        let embedded = py.detach(|| {
            let prompt = |text| model.text().prompt_tokens(&Prompt::Text { text, special: false });
            let prompts = texts.into_iter().map(prompt).collect::<Result<Vec<_>, _>>()?;
            model.embed(&prompts, &mut |_| listener.tell("embedding", 0, 0))
        });
        let vectors = listener.outcome(embedded.map_err(|error| fault::of(py, &error)))?;
        Ok(if raw { vectors } else { vectors.into_iter().map(of_length_one).collect() })
    }

    /// The tokens of a text, as a prompt has them.
    fn tokenize(&self, py: Python<'_>, text: String) -> PyResult<Vec<u32>> {
        let model = self.shared(py)?;
        let prompt = Prompt::Text { text, special: false };
        py.detach(|| model.text().prompt_tokens(&prompt)).map_err(|error| fault::of(py, &error))
    }

    /// The text of tokens.
    fn detokenize(&self, py: Python<'_>, tokens: Vec<u32>) -> PyResult<String> {
        let model = self.shared(py)?;
        let tokenizer = model.text().tokenizer().ok_or(fornax::Error::NoTokenizer);
        tokenizer.map(|tokenizer| tokenizer.decode(&tokens)).map_err(|error| fault::of(py, &error))
    }

    /// Most tokens of a request, prompt and answer together.
    #[getter]
    fn context(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.shared(py)?.context())
    }

    /// Requests computed at once.
    #[getter]
    fn parallel(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.shared(py)?.parallel())
    }

    /// Where it is computed, in words.
    #[getter]
    fn device(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.shared(py)?.device().to_owned())
    }

    /// Whether it makes embeddings and no answers.
    #[getter]
    fn is_encoder(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.shared(py)?.handle().capacity().encodes)
    }

    /// Bytes that it takes.
    #[getter]
    fn memory_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.shared(py)?.plan().total_bytes())
    }

    /// Frees it, once the answers under way are over.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.inner.write().unwrap_or_else(PoisonError::into_inner).take()));
    }
}
