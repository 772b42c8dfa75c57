//! The flags that say how tokens are chosen, and the request that they stand for.

use std::path::PathBuf;

use clap::{Args, CommandFactory as _, Parser};
use fornax::{Error, Form, Mirostat, Prompt, Request, Sampling, Text};

use super::args::{positive, token_id};
use super::failure::Failure;
use super::output;

/// How tokens are chosen and when to stop. What is not given here takes the command's default.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Most tokens to generate [default: what is left of the context]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = positive)]
    max_tokens: Option<usize>,
    /// Allow no end token before this many tokens
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    min_tokens: Option<u32>,
    /// 0 is greedy; higher is more varied
    #[arg(long, value_name = "T", allow_negative_numbers = true, value_parser = ranged(|sampling, x| sampling.temperature = x))]
    temperature: Option<f32>,
    /// How far the temperature moves either way with the entropy; 0 keeps it
    #[arg(long, value_name = "T", allow_negative_numbers = true, value_parser = ranged(|sampling, x| sampling.dynatemp_range = x))]
    dynatemp_range: Option<f32>,
    /// How the entropy's share of its largest value becomes the temperature's [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = ranged(|sampling, x| sampling.dynatemp_exponent = x))]
    dynatemp_exponent: Option<f32>,
    /// Keep only the K most likely tokens; 0 keeps all
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<u32>,
    /// Keep the most likely tokens that reach this probability together; 1 keeps all
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = some_of(|sampling, x| sampling.top_p = x))]
    top_p: Option<f32>,
    /// Drop tokens less likely than this share of the most likely; 0 keeps all
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = ranged(|sampling, x| sampling.min_p = x))]
    min_p: Option<f32>,
    /// Keep the most typical tokens that reach this probability together; 1 keeps all
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = some_of(|sampling, x| sampling.typical_p = x))]
    typical_p: Option<f32>,
    /// Keep logits within this many standard deviations of the largest; 0 keeps all
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = ranged(|sampling, x| sampling.top_n_sigma = x))]
    top_n_sigma: Option<f32>,
    /// How often all but the least likely of the likely tokens are excluded (XTC); 0 is never
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = ranged(|sampling, x| sampling.xtc_probability = x))]
    xtc_probability: Option<f32>,
    /// From which probability on a token counts as likely for XTC [default: 0.1]
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = ranged(|sampling, x| sampling.xtc_threshold = x))]
    xtc_threshold: Option<f32>,
    /// Scale of the penalty on continuing a repetition (DRY); 0 is off
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = ranged(|sampling, x| sampling.dry_multiplier = x))]
    dry_multiplier: Option<f32>,
    /// By how much that penalty grows with each repeated token [default: 1.75]
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = ranged(|sampling, x| sampling.dry_base = x))]
    dry_base: Option<f32>,
    /// From which length on a repetition is penalised [default: 2]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    dry_allowed_length: Option<u32>,
    /// How many tokens back DRY looks [default: all]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    dry_penalty_last_n: Option<u32>,
    /// A text that no repetition reaches across; may be given several times [default: line break, :, ", *]
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = not_empty)]
    dry_sequence_breaker: Vec<String>,
    /// Choose by surprise (1 or 2) in place of the truncations above; 0 is off
    #[arg(long, value_name = "VERSION", allow_negative_numbers = true, value_parser = mirostat)]
    mirostat: Option<Mirostat>,
    /// The surprise that mirostat aims at, in bits [default: 5]
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = ranged(|sampling, x| sampling.mirostat_tau = x))]
    mirostat_tau: Option<f32>,
    /// How fast mirostat corrects towards it [default: 0.1]
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = ranged(|sampling, x| sampling.mirostat_eta = x))]
    mirostat_eta: Option<f32>,
    /// Divides the positive logits and multiplies the others of tokens that occurred; 1 changes nothing
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = ranged(|sampling, x| sampling.repetition_penalty = x))]
    repeat_penalty: Option<f32>,
    /// Subtracted once from the logits of tokens that were generated
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = ranged(|sampling, x| sampling.presence_penalty = x))]
    presence_penalty: Option<f32>,
    /// Subtracted from the logits of tokens for each time that they were generated
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = ranged(|sampling, x| sampling.frequency_penalty = x))]
    frequency_penalty: Option<f32>,
    /// How many tokens back the three penalties look [default: all]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    repeat_last_n: Option<u32>,
    /// Added to a token's logit; may be given several times
    #[arg(long, value_name = "TOKEN=BIAS", allow_hyphen_values = true, value_parser = bias)]
    logit_bias: Vec<(u32, f32)>,
    /// A text that is never written; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = not_empty)]
    bad_word: Vec<String>,
    /// Token ids that are never chosen, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', value_parser = token_id)]
    banned_tokens: Vec<u32>,
    /// The only token ids that may be chosen, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', value_parser = token_id)]
    allowed_tokens: Option<Vec<u32>>,
    /// Fixes the random numbers; one is drawn and reported where none is given
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<u64>,
    /// Stop before this text; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = not_empty)]
    stop: Vec<String>,
    /// Go on past end tokens
    #[arg(long)]
    ignore_eos: bool,
    #[command(flatten)]
    form: FormArgs,
}

/// What the answer must look like.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Form of the answer")]
#[group(multiple = false)]
struct FormArgs {
    /// JSON that is valid against the schema in this file, written compactly
    #[arg(long, value_name = "FILE")]
    schema: Option<PathBuf>,
    /// Any JSON object, written compactly
    #[arg(long)]
    json_object: bool,
    /// A match of this regular expression, from its first character to its last
    #[arg(long, value_name = "REGEX", allow_hyphen_values = true)]
    regex: Option<String>,
    /// A sentence of the grammar in this file, in Lark's syntax or llama.cpp's (GBNF)
    #[arg(long, value_name = "FILE")]
    grammar: Option<PathBuf>,
    /// Exactly one of these texts; give it several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = not_empty)]
    choice: Vec<String>,
}

/// Where repetitions end unless the user says otherwise: llama.cpp's choice.
const BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

/// Flags of sampling alone, as a chat's `/set` gives them.
#[derive(Debug, Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct Settings {
    #[command(flatten)]
    sampling: SamplingArgs,
}

impl SamplingArgs {
    /// These flags with one of them changed: `name` is a flag's, with underscores or hyphens. What is wrong, in a line.
    pub(crate) fn with(&self, name: &str, value: &str) -> Result<SamplingArgs, String> {
        let takes_value = self.knows(name)?;
        let name = flag_name(name);
        let mut settings = Settings { sampling: self.clone() };
        let flag = match takes_value {
            false if value == "on" => vec![format!("--{name}")],
            false => return Err(format!("{name} is on or off")),
            true => vec![format!("--{name}={value}")],
        };
        match settings.try_update_from(flag) {
            Ok(()) => Ok(settings.sampling),
            Err(error) => {
                let text = error.to_string();
                let line = text.lines().next().unwrap_or_default();
                Err(line.trim_start_matches("error: ").to_owned())
            }
        }
    }

    /// Whether the flag of that name takes a value; an error where there is none of sampling.
    pub(crate) fn knows(&self, name: &str) -> Result<bool, String> {
        let name = flag_name(name);
        let form = FormArgs::augment_args(clap::Command::new(""));
        let is_form = form.get_arguments().any(|argument| argument.get_long() == Some(&name));
        let command = Settings::command();
        let known = command.get_arguments().find(|argument| argument.get_long() == Some(&name) && !is_form);
        let known = known.map(|argument| argument.get_action().takes_values());
        known.ok_or_else(|| {
            format!("there is no setting {name:?}; `fornax run --help` lists those of sampling")
        })
    }

    /// What the answer must look like; read before anything is loaded.
    pub(crate) fn form(&self) -> Result<Option<Form>, Failure> {
        let FormArgs { schema, json_object, regex, grammar, choice } = &self.form;
        Ok(if let Some(path) = schema {
            let schema = serde_json::from_str(&output::text_of(path)?).map_err(|error| {
                Failure::usage(format!("--schema {} is no JSON: {error}; correct it", path.display()))
            })?;
            Some(Form::JsonSchema(schema))
        } else if *json_object {
            Some(Form::JsonObject)
        } else if let Some(regex) = regex {
            Some(Form::Regex(regex.clone()))
        } else if let Some(path) = grammar {
            Some(Form::Grammar(output::text_of(path)?))
        } else if !choice.is_empty() {
            Some(Form::Choice(choice.clone()))
        } else {
            None
        })
    }

    /// The request that the flags stand for, with the command's defaults for what they do not say. Texts among them
    /// become tokens of this model.
    pub(crate) fn request(
        &self,
        prompt: Prompt,
        form: Option<Form>,
        defaults: Sampling,
        text: &Text,
    ) -> Result<Request, Error> {
        let mirostat = self.mirostat.unwrap_or(defaults.mirostat);
        // A default gives way to what replaces it; a flag would be refused.
        let top_p = if mirostat == Mirostat::Off { defaults.top_p } else { 1.0 };
        let dry_multiplier = self.dry_multiplier.unwrap_or(defaults.dry_multiplier);
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            dynatemp_range: self.dynatemp_range.unwrap_or(defaults.dynatemp_range),
            dynatemp_exponent: self.dynatemp_exponent.unwrap_or(defaults.dynatemp_exponent),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            typical_p: self.typical_p.unwrap_or(defaults.typical_p),
            top_n_sigma: self.top_n_sigma.unwrap_or(defaults.top_n_sigma),
            xtc_probability: self.xtc_probability.unwrap_or(defaults.xtc_probability),
            xtc_threshold: self.xtc_threshold.unwrap_or(defaults.xtc_threshold),
            dry_multiplier,
            dry_base: self.dry_base.unwrap_or(defaults.dry_base),
            dry_allowed_length: self.dry_allowed_length.unwrap_or(defaults.dry_allowed_length),
            dry_penalty_last_n: self.dry_penalty_last_n.or(defaults.dry_penalty_last_n),
            dry_sequence_breakers: if dry_multiplier > 0.0 { self.breakers(text)? } else { Vec::new() },
            mirostat,
            mirostat_tau: self.mirostat_tau.unwrap_or(defaults.mirostat_tau),
            mirostat_eta: self.mirostat_eta.unwrap_or(defaults.mirostat_eta),
            repetition_penalty: self.repeat_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            repeat_last_n: self.repeat_last_n.or(defaults.repeat_last_n),
            logit_bias: self.logit_bias.clone(),
            bad_words: self.bad_words(text)?,
            allowed_token_ids: self.allowed_tokens.clone(),
            min_tokens: self.min_tokens.unwrap_or(0),
            ..defaults
        };
        Ok(Request {
            sampling,
            max_tokens: self.max_tokens,
            stop: self.stop.clone(),
            ignore_eos: self.ignore_eos,
            seed: self.seed,
            form,
            ..Request::new(prompt)
        })
    }

    fn breakers(&self, text: &Text) -> Result<Vec<Vec<u32>>, Error> {
        // A model without a tokenizer repeats ids, and nothing stands between them.
        let Some(_) = text.tokenizer() else {
            return if self.dry_sequence_breaker.is_empty() {
                Ok(Vec::new())
            } else {
                Err(Error::NoTokenizer)
            };
        };
        let given = self.dry_sequence_breaker.iter().map(String::as_str);
        let texts: Vec<&str> =
            if self.dry_sequence_breaker.is_empty() { BREAKERS.to_vec() } else { given.collect() };
        texts.into_iter().map(|breaker| text.tokens(breaker)).collect()
    }

    /// A word is forbidden at the beginning of a text and behind a space, which are different tokens.
    fn bad_words(&self, text: &Text) -> Result<Vec<Vec<u32>>, Error> {
        let mut words: Vec<Vec<u32>> = self.banned_tokens.iter().map(|&token| vec![token]).collect();
        for word in &self.bad_word {
            words.push(text.tokens(word)?);
            words.push(text.tokens(&format!(" {word}"))?);
        }
        Ok(words)
    }
}

/// Parses a number whose range is that of the parameter that `set` sets: [`Sampling::check`] says which, alone in a
/// request that is otherwise neutral.
fn ranged(
    set: fn(&mut Sampling, f32),
) -> impl Fn(&str) -> Result<f32, String> + Clone + Send + Sync + 'static {
    move |text| {
        let value = text.parse().map_err(|_| "it must be a number, as in 0.7".to_owned())?;
        let mut sampling = Sampling::default();
        set(&mut sampling, value);
        allowed(&sampling).map(|()| value)
    }
}

/// The same for a share of which something must be left.
fn some_of(
    set: fn(&mut Sampling, f32),
) -> impl Fn(&str) -> Result<f32, String> + Clone + Send + Sync + 'static {
    move |text| match ranged(set)(text)? {
        0.0 => Err("it must be above 0: nothing would be left to choose from".to_owned()),
        value => Ok(value),
    }
}

fn allowed(sampling: &Sampling) -> Result<(), String> {
    sampling.check(u32::MAX).map_err(|error| match error {
        fornax_compute::Error::SampleParameter { wanted, .. } => format!("it must be {wanted}"),
        other => other.to_string(),
    })
}

fn mirostat(text: &str) -> Result<Mirostat, String> {
    match text {
        "0" => Ok(Mirostat::Off),
        "1" => Ok(Mirostat::V1),
        "2" => Ok(Mirostat::V2),
        _ => Err("it must be 0 (off), 1 or 2".to_owned()),
    }
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let pair =
        text.split_once('=').and_then(|(token, bias)| Some((token_id(token).ok()?, bias.parse().ok()?)));
    let pair =
        pair.filter(|&pair| allowed(&Sampling { logit_bias: vec![pair], ..Sampling::default() }).is_ok());
    pair.ok_or_else(|| "it must be a token id, = and a finite number, as in 504=-2.5".to_owned())
}

/// A flag by the name that programs have for it, too: `top_p` is `--top-p`.
fn flag_name(name: &str) -> String {
    name.trim_start_matches('-').replace('_', "-")
}

fn not_empty(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("it must not be empty".to_owned()) } else { Ok(text.to_owned()) }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::cli::args::Cli;

    #[test]
    fn sampling_values_out_of_range_are_refused_by_name() {
        let check = |flag: &str, value: &str, allowed: bool| {
            let parsed = Cli::try_parse_from(["fornax", "generate", "--prompt", "x", flag, value]);
            match parsed {
                Ok(_) => assert!(allowed, "{flag} {value}"),
                Err(error) => {
                    assert!(!allowed, "{flag} {value}: {error}");
                    assert!(error.to_string().contains(flag), "{error}");
                }
            }
        };
        check("--temperature", "0", true);
        check("--temperature", "1.5", true);
        check("--temperature", "-1", false);
        check("--temperature", "nan", false);
        check("--temperature", "inf", false);
        check("--top-p", "1", true);
        check("--top-p", "0", false);
        check("--top-p", "1.01", false);
        check("--top-p", "NaN", false);
        check("--min-p", "0", true);
        check("--min-p", "-0.1", false);
        check("--top-k", "0", true);
        check("--top-k", "-1", false);
        check("--max-tokens", "0", false);
        check("--max-tokens", "-5", false);
        check("--threads", "-1", false);
        check("--seed", "18446744073709551615", true);
        check("--seed", "1.5", false);
        check("--stop", "", false);
        check("--typical-p", "0.5", true);
        check("--typical-p", "0", false);
        check("--top-n-sigma", "-1", false);
        check("--xtc-probability", "1.1", false);
        check("--dry-base", "0.5", false);
        check("--dry-multiplier", "inf", false);
        check("--mirostat", "2", true);
        check("--mirostat", "3", false);
        check("--repeat-penalty", "0", false);
        check("--presence-penalty", "-2", true);
        check("--frequency-penalty", "nan", false);
        check("--logit-bias", "5=-1.5", true);
        check("--logit-bias", "5", false);
        check("--logit-bias", "5=inf", false);
        check("--banned-tokens", "1,x", false);
        check("--allowed-tokens", "1,2", true);
        check("--choice", "", false);
        check("--bad-word", "", false);
    }
}
