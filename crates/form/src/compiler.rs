//! Forms become grammars here: off the engine's thread, once each.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
    time::Duration,
};

use fornax_engine::Grammar;
use llguidance::{
    ParserFactory, TokenParser,
    api::{GrammarInit, StopReason, TopLevelGrammar},
    earley::{CGrammar, CSymIdx},
};
use toktrie::TokEnv;

use crate::{
    Form, FormError,
    guide::Guide,
    meeting,
    vocabulary::{Environment, Vocabulary},
};

/// Compiled forms kept for the next request that asks for the same.
const KEPT: usize = 64;

/// Bytes of the forms that are kept, as they were asked for: a compiled form is many times as large.
const KEPT_BYTES: usize = 4 << 20;

/// The compiler recurses over references and nesting, both bounded by the check before it: this is enough for the
/// longest chain it lets through (a test says so). Only what is used of it costs memory.
const STACK: usize = 256 << 20;

/// How often somebody who waits looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(50);

/// Whose a form is, where several share what is kept.
pub type Owner = Option<Arc<str>>;

/// Compiles a form elsewhere, within bounds of time and memory, as long as it is wanted: whether it can be.
pub type Trial = Arc<dyn Fn(&Form, &dyn Fn() -> bool) -> Result<(), FormError> + Send + Sync>;

/// Compiles forms for one vocabulary. Shared by all callers; the engine never waits for it.
pub struct Grammars {
    factory: ParserFactory,
    end_tokens: Arc<[u32]>,
    shelf: Mutex<Shelf>,
    /// Where new forms are compiled first.
    trial: OnceLock<Trial>,
    /// Somebody has finished compiling.
    finished: Condvar,
}

/// What was compiled, and what is being compiled.
#[derive(Default)]
struct Shelf {
    /// Refusals too: asking again must not cost again.
    kept: HashMap<Arc<str>, Result<Grammar, FormError>>,
    /// Their keys and who had them compiled, most recently used last.
    order: VecDeque<Kept>,
    bytes: usize,
    /// Whoever wants one of these waits for whoever compiles it, if they have one owner.
    compiling: Vec<Kept>,
    /// How often the compiler ran.
    compiled: u64,
}

#[derive(Clone, PartialEq)]
struct Kept {
    owner: Owner,
    key: Arc<str>,
}

impl Grammars {
    /// Builds the trie of all tokens.
    pub fn new(vocabulary: Vocabulary) -> Result<Grammars, FormError> {
        let end_tokens: Arc<[u32]> = vocabulary.end_tokens.clone().into();
        let environment: TokEnv = Arc::new(Environment::new(vocabulary)?);
        let mut factory = ParserFactory::new_simple(&environment)
            .map_err(|error| FormError::Compile(first_line(&error.to_string())))?;
        factory.quiet();
        let limits = factory.limits_mut();
        // Errors go to the caller: they must not carry what was generated.
        limits.verbose_errors = false;
        // One or two kilobytes each, for every sequence.
        limits.max_lexer_states = 50_000;
        Ok(Grammars {
            factory,
            end_tokens,
            shelf: Mutex::default(),
            trial: OnceLock::new(),
            finished: Condvar::new(),
        })
    }

    /// The compiled form, from the kept ones if it is there. The same form is compiled once, however many ask at once.
    pub fn compile(&self, form: &Form) -> Result<Grammar, FormError> {
        self.compile_for(form, &None, &|| true)
    }

    /// The same for one of several owners, as long as it is wanted. None of them waits for what is compiled for another,
    /// and none pushes out what is another's while it has more on the shelf itself.
    pub fn compile_for(
        &self,
        form: &Form,
        owner: &Owner,
        wanted: &dyn Fn() -> bool,
    ) -> Result<Grammar, FormError> {
        let own = Kept { owner: owner.clone(), key: form.key()? };
        let mut shelf = self.shelf();
        loop {
            if let Some(known) = shelf.recall(&own.key) {
                return known;
            }
            if !shelf.compiling.contains(&own) {
                break;
            }
            if !wanted() {
                return Err(FormError::Unwanted);
            }
            let waited = self.finished.wait_timeout(shelf, LOOK);
            shelf = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        shelf.compiling.push(own.clone());
        drop(shelf);
        // Outside the lock: a large schema takes its time and must not hold up others.
        let compiled = self.tried(form, wanted).and_then(|()| self.compile_new(form));
        let mut shelf = self.shelf();
        shelf.compiling.retain(|other| *other != own);
        shelf.compiled += 1;
        if compiled.as_ref().err() != Some(&FormError::Unwanted) {
            shelf.keep(own, compiled.clone());
        }
        drop(shelf);
        self.finished.notify_all();
        compiled
    }

    /// How many forms were compiled since the start; those that were kept cost nothing.
    pub fn compiled(&self) -> u64 {
        self.shelf().compiled
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has every new form compiled elsewhere before it is compiled here. What was set first stays.
    pub fn try_with(&self, trial: Trial) {
        drop(self.trial.set(trial));
    }

    fn tried(&self, form: &Form, wanted: &dyn Fn() -> bool) -> Result<(), FormError> {
        match self.trial.get() {
            Some(trial) => trial(form, wanted),
            None => Ok(()),
        }
    }

    /// Compiles on a thread with room for the compiler's recursion. A panic of the compiler refuses the form.
    fn compile_new(&self, form: &Form) -> Result<Grammar, FormError> {
        thread::scope(|scope| {
            let compiler = thread::Builder::new().name("form".into()).stack_size(STACK);
            let compiler = compiler.spawn_scoped(scope, || self.compile_top(form.written()?));
            let compiler =
                compiler.map_err(|error| FormError::Compile(format!("no thread to compile it: {error}")))?;
            compiler.join().unwrap_or_else(|_| Err(FormError::Compile("the compiler panicked".to_owned())))
        })
    }

    fn compile_top(&self, top: TopLevelGrammar) -> Result<Grammar, FormError> {
        let (environment, limits) = (self.factory.tok_env().clone(), self.factory.limits().clone());
        let (rules, lexer) = GrammarInit::Serialized(top)
            .to_internal(Some(environment), limits)
            .map_err(|error| refused(&error.to_string()))?;
        // Before the lexer is built: what it intersects is not counted by its limits.
        meeting::check_terms(lexer.regex_builder.exprset())?;
        let mut parser = self
            .factory
            .create_parser_from_init_default(GrammarInit::Internal(rules, lexer))
            .map_err(|error| refused(&error.to_string()))?;
        check_rules(&parser)?;
        // What accepts nothing at all is refused here, not after a prompt was computed.
        parser.start_without_prompt();
        match parser.compute_mask() {
            Ok(_) => {}
            Err(_) if parser.stop_reason() == StopReason::NoExtensionBias => {
                return Err(FormError::Unsatisfiable);
            }
            Err(error) => return Err(FormError::Compile(first_line(&error.to_string()))),
        }
        let vocab =
            u32::try_from(self.factory.tok_env().tok_trie().vocab_size()).expect("token ids fit 32 bits");
        Ok(Box::new(Guide::new(parser, Arc::clone(&self.end_tokens), vocab)))
    }
}

impl Shelf {
    /// What was compiled, for whomever: it stays among those of the owner who had it compiled.
    fn recall(&mut self, key: &Arc<str>) -> Option<Result<Grammar, FormError>> {
        let known = self.kept.get(key)?.clone();
        let place = self.order.iter().position(|kept| kept.key == *key)?;
        let kept = self.order.remove(place)?;
        self.order.push_back(kept);
        Some(known)
    }

    fn keep(&mut self, new: Kept, compiled: Result<Grammar, FormError>) {
        if self.kept.contains_key(&new.key) {
            // Another owner had it compiled meanwhile.
            return;
        }
        self.bytes += new.key.len();
        self.kept.insert(Arc::clone(&new.key), compiled);
        self.order.push_back(new);
        while self.order.len() > KEPT || self.bytes > KEPT_BYTES {
            // Of whoever has the most of what there is too much of.
            let place = if self.order.len() > KEPT {
                self.oldest_of_the_largest(|_| 1)
            } else {
                self.oldest_of_the_largest(|kept| kept.key.len())
            };
            let Some(oldest) = place.and_then(|place| self.order.remove(place)) else { return };
            self.bytes -= oldest.key.len();
            self.kept.remove(&oldest.key);
        }
    }

    /// The place of the form that was not used for the longest time, among those of the owner with the largest sum.
    fn oldest_of_the_largest(&self, size: impl Fn(&Kept) -> usize) -> Option<usize> {
        let mut sums: HashMap<&Owner, usize> = HashMap::new();
        for kept in &self.order {
            *sums.entry(&kept.owner).or_default() += size(kept);
        }
        let most = sums.values().max()?;
        self.order.iter().position(|kept| sums.get(&kept.owner) == Some(most))
    }
}

/// Refuses rules that ask for what the engine does not do, and rules from which no end can be reached: an answer that
/// takes one would never be whole.
fn check_rules(parser: &TokenParser) -> Result<(), FormError> {
    let grammar: &CGrammar = parser.parser.grammar();
    let mut known: Vec<CSymIdx> = vec![grammar.start()];
    let mut seen: HashMap<usize, bool> = HashMap::from([(grammar.start().as_index(), false)]);
    let mut next = 0;
    while let Some(&symbol) = known.get(next) {
        next += 1;
        let data = grammar.sym_data(symbol);
        if data.props.temperature != 0.0 {
            return Err(FormError::Compile("a grammar cannot set the temperature".to_owned()));
        }
        for &rule in grammar.rules_of(symbol) {
            for &part in grammar.rule_rhs(rule).0 {
                if seen.insert(part.as_index(), false).is_none() {
                    known.push(part);
                }
            }
        }
    }
    // A symbol has an end when it is text, may be empty, or has a rule whose parts all have one.
    loop {
        let mut changed = false;
        // Backwards, because parts were found after what they are part of: few rounds are enough.
        for &symbol in known.iter().rev() {
            let data = grammar.sym_data(symbol);
            let ends = |part: &CSymIdx| seen.get(&part.as_index()).copied().unwrap_or(false);
            let has_end = data.is_terminal
                || data.is_nullable
                || !data.cond_nullable.is_empty()
                || data.gen_grammar.is_some()
                || grammar.rules_of(symbol).iter().any(|&rule| grammar.rule_rhs(rule).0.iter().all(ends));
            if has_end && !ends(&symbol) {
                seen.insert(symbol.as_index(), true);
                changed = true;
            }
        }
        if !changed {
            break;
        }
    }
    if seen.get(&grammar.start().as_index()) == Some(&false) {
        return Err(FormError::Unsatisfiable);
    }
    if seen.values().any(|has_end| !has_end) {
        return Err(FormError::Compile("a part of this form refers to itself without an end".to_owned()));
    }
    Ok(())
}

/// What the compiler does not compile.
fn refused(reason: &str) -> FormError {
    let reason = first_line(reason);
    if reason.starts_with("Unsatisfiable schema") {
        FormError::Unsatisfiable
    } else {
        FormError::Compile(reason)
    }
}

/// Reasons repeat what they are about, which may be long.
pub(crate) fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use fornax_engine::allows;
    use serde_json::{Value, json};

    use super::*;

    /// A vocabulary of single bytes, and one end token.
    fn grammars() -> Grammars {
        let mut bytes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        bytes.push(Vec::new());
        let encode = Arc::new(|bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte)).collect());
        Grammars::new(Vocabulary { bytes, end_tokens: vec![256], encode }).unwrap()
    }

    /// Whether `text` can be written from beginning to end, and the answer may end there.
    fn accepts(form: &Form, text: &str) -> bool {
        let mut grammar = grammars().compile(form).unwrap();
        for byte in text.bytes() {
            let mask = grammar.mask().unwrap();
            if !allows(&mask, u32::from(byte)) {
                return false;
            }
            grammar.accept(u32::from(byte)).unwrap();
        }
        let may_end = grammar.may_end();
        assert_eq!(allows(&grammar.mask().unwrap(), 256), may_end, "the end token is allowed exactly there");
        may_end
    }

    #[test]
    fn each_form_accepts_what_it_says_and_nothing_else() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
            "additionalProperties": false});
        let check = |form: &Form, yes: &[&str], no: &[&str]| {
            for text in yes {
                assert!(accepts(form, text), "{form:?} refuses {text:?}");
            }
            for text in no {
                assert!(!accepts(form, text), "{form:?} accepts {text:?}");
            }
        };
        check(
            &Form::JsonSchema(schema),
            &[r#"{"a":1}"#, r#"{"a":-12}"#],
            &["{}", r#"{"a": 1}"#, r#"{"a":1.5}"#, r#"{"a":1"#],
        );
        check(&Form::JsonObject, &["{}", r#"{"x":[1,{"y":null}]}"#], &["[]", "1", "{", "{ }"]);
        check(&Form::Regex("[ab]+c".into()), &["abc", "bc"], &["c", "ab", "abcd"]);
        check(
            &Form::Choice(vec!["yes".into(), "no \"way\"".into()]),
            &["yes", "no \"way\""],
            &["ye", "maybe"],
        );
        check(&Form::Grammar("start: \"x\" \"y\"+".into()), &["xy", "xyyy"], &["x", "y"]);
    }

    #[test]
    fn forced_tokens_are_found() {
        let form = Form::JsonSchema(json!({"type": "object", "properties": {"name": {"type": "boolean"}},
            "required": ["name"], "additionalProperties": false}));
        let mut grammar = grammars().compile(&form).unwrap();
        let forced: Vec<u8> = grammar.forced().iter().map(|&token| u8::try_from(token).unwrap()).collect();
        assert_eq!(forced, br#"{"name":"#);
        for &byte in forced.iter().chain(b"t") {
            assert!(!grammar.may_end());
            grammar.accept(u32::from(byte)).unwrap();
        }
        assert_eq!(grammar.forced(), b"rue}".map(u32::from));
        for byte in *b"rue}" {
            grammar.accept(u32::from(byte)).unwrap();
        }
        assert!(grammar.is_over());
    }

    #[test]
    fn what_would_be_ignored_is_refused_with_its_path() {
        let check = |schema: Value, keyword: &str, path: &str| {
            let refused = grammars().compile(&Form::JsonSchema(schema)).unwrap_err();
            assert_eq!(refused, FormError::Keyword { keyword: keyword.into(), path: path.into() });
        };
        check(json!({"not": {}}), "not", "");
        check(json!({"properties": {"a/b": {"uniqueItems": true}}}), "uniqueItems", "/properties/a~1b");
        check(json!({"items": [{}, {"if": true}]}), "if", "/items/1");
        check(json!({"$defs": {"x": {"anyOf": [{"contains": {}}]}}}), "contains", "/$defs/x/anyOf/0");
        // A property may have any name.
        assert!(accepts(
            &Form::JsonSchema(
                json!({"type": "object", "properties": {"not": {"const": 1}}, "required": ["not"],
                "additionalProperties": false})
            ),
            r#"{"not":1}"#
        ));
    }

    #[test]
    fn what_cannot_be_compiled_is_refused_in_one_line() {
        for form in [
            Form::Regex("(".into()),
            Form::Grammar("start: undefined_rule".into()),
            Form::Choice(Vec::new()),
            Form::JsonSchema(json!({"type": "nonsense"})),
        ] {
            let Err(FormError::Compile(reason)) = grammars().compile(&form) else {
                panic!("{form:?} compiled")
            };
            assert!(!reason.is_empty() && !reason.contains('\n'), "{reason:?}");
        }
    }
}
